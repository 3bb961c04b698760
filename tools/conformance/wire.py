"""One request, and all that came back of it: its parts, its end, and when.

Every request ends, whatever the server does: the client closes the connection at ``limit_s``.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from .budget import Budget, Unusable
from .target import Saying, Target

PATH: Final = "/chat/completions"
PROMPT: Final = "Tell me a long story about a fox and a lighthouse."
_LINE_MAX: Final = 1 << 20
"""Longest line of an event stream in bytes."""
_BODY_MAX: Final = 1 << 24
_SAID_MAX: Final = 200


class Gone(Unusable):
    """Nobody listens at the server's address."""


@dataclass(slots=True)
class Answer:
    """Everything that came back. Times are seconds since the request was sent; an ``inf`` never
    was."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers, by names in any case."""
    first_s: float = math.inf
    """Time of the first text."""
    last_s: float = 0.0
    """Time of the last text."""
    end_s: float = math.inf
    longest_gap_s: float = 0.0
    """Longest time between two texts."""
    texts: int = 0
    """Events that had text."""
    usage_tokens: int | None = None
    text: str = ""
    finish: str = ""
    error: Mapping[str, Any] | None = None
    is_complete: bool = False
    """Whether all of it came: a body, or a stream with its ``[DONE]``."""
    is_hung_up: bool = False
    """Whether this client closed the connection before the end."""
    broken: str = ""
    """Reason why what came cannot be read, in words."""
    body: bytes = b""
    """Body of an answer that is not a stream."""
    started: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set with the first text, or with the end where there is none."""

    @property
    def tokens(self) -> int:
        """Tokens received: as the server counts them, else one for each event with text."""
        return self.texts if self.usage_tokens is None else self.usage_tokens

    @property
    def is_refused(self) -> bool:
        return self.status >= 400

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole answer, ended by the model or by ``max_tokens``."""
        is_well = self.status == 200 and self.error is None and not self.broken
        return is_well and self.is_complete and self.finish in ("stop", "length")

    def outcome(self) -> str:
        """What became of it, in a few words."""
        if self.is_hung_up:
            return f"no end within {self.end_s:.3g} s"
        if self.broken:
            return self.broken
        if self.status >= 400 or self.error is not None:
            told = str((self.error or {}).get("message", "")) or self.body.decode(errors="replace")
            return f"status {self.status}: {' '.join(told.split())[:_SAID_MAX] or 'no body'}"
        return f"status {self.status}, {self.tokens} tokens, finish_reason {self.finish or 'none'}"


class Running:
    """A request that runs beside others; ``answer`` fills as it comes in."""

    def __init__(self, answer: Answer, reading: Awaitable[None]) -> None:
        self.answer = answer
        self._task = asyncio.ensure_future(reading)

    @property
    def is_done(self) -> bool:
        return self._task.done()

    async def end(self) -> Answer:
        """Wait until it has ended."""
        await self._task
        return self.answer

    async def hang_up(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # seen: whoever hangs up has no more questions


class Wire:
    """Sends requests to one target."""

    def __init__(self, http: aiohttp.ClientSession, target: Target, budget: Budget) -> None:
        self.target = target
        self.budget = budget
        self.clock = asyncio.get_running_loop().time
        self.fields: dict[str, object] = {"ignore_eos": True}
        """Fields that make answers as long as asked for, where the server takes them."""
        self._http = http

    def begin(
        self,
        tokens: int,
        limit_s: float,
        *,
        stream: bool = True,
        told: tuple[Saying, str] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> Running:
        """Ask for an answer of ``tokens``; ``told`` is how and which deadline is stated, ``more``
        further fields."""
        headers: dict[str, str] = {}
        body: dict[str, object] = {
            "model": self.target.model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "temperature": 1.0,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **self.fields,
            **self.target.fields,
            **(more or {}),
        }
        if told is not None:
            saying, text = told
            saying.put(text, headers, body)
        return self.begin_post(json.dumps(body).encode(), limit_s, headers)

    def begin_post(
        self, body: bytes, limit_s: float, headers: Mapping[str, str] | None = None
    ) -> Running:
        """Post ``body`` as it is to the chat route."""
        answer = Answer()
        return Running(answer, self._ask("POST", PATH, answer, limit_s, body, headers or {}))

    async def chat(
        self,
        tokens: int,
        limit_s: float,
        *,
        stream: bool = True,
        told: tuple[Saying, str] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> Answer:
        """Ask as ``begin`` does, and wait. Raises ``Gone``."""
        running = self.begin(tokens, limit_s, stream=stream, told=told, more=more)
        try:
            return await running.end()
        finally:
            await running.hang_up()

    async def get(self, path: str, limit_s: float) -> Answer:
        """Get a path below the base URL. Raises ``Gone``."""
        answer = Answer()
        await self._ask("GET", path, answer, limit_s, None, {})
        return answer

    async def _ask(
        self,
        method: str,
        path: str,
        answer: Answer,
        limit_s: float,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> None:
        self.budget.take()
        began = self.clock()
        url = self.target.path(path)
        sent = {"Content-Type": "application/json", **headers}
        if self.target.key:
            sent["Authorization"] = f"Bearer {self.target.key}"
        limit = asyncio.timeout(limit_s)
        try:
            async with limit, self._http.request(method, url, data=body, headers=sent) as response:
                try:
                    await self._read(response, answer, began)
                finally:
                    if not response.content.is_eof():
                        response.close()
        except aiohttp.ClientConnectorError as error:
            raise Gone(
                f"nobody answers at {self.target.url}: {error.os_error.strerror or error}; is the"
                " server running, and is this its base URL?"
            ) from error
        except TimeoutError:
            if not limit.expired():
                raise
            answer.is_hung_up = True
        except (aiohttp.ClientError, ConnectionError) as error:
            answer.broken = f"the connection broke: {type(error).__name__}: {error}"
        finally:
            answer.end_s = self.clock() - began
            answer.started.set()

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, began: float) -> None:
        answer.status, answer.headers = response.status, response.headers
        if response.content_type != "text/event-stream":
            answer.body = await _body(response, answer)
            _take_body(answer, response.content_type, self.clock() - began)
            return
        pending = b""
        async for data in response.content.iter_any():
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    _take_event(answer, line[5:].strip(), self.clock() - began)
            if len(pending) > _LINE_MAX:
                answer.broken = f"a line of its event stream is longer than {_LINE_MAX} bytes"
            if answer.broken or answer.is_complete:
                return
        answer.broken = answer.broken or ("" if answer.error else "its event stream has no [DONE]")


async def together(runs: Iterable[Running]) -> list[Answer]:
    """Answers of requests that run at once. Raises ``Gone`` when one could not be sent, and hangs
    up on the others."""
    listed = list(runs)
    try:
        return [await run.end() for run in listed]
    finally:
        for run in listed:
            await run.hang_up()


async def _body(response: aiohttp.ClientResponse, answer: Answer) -> bytes:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > _BODY_MAX:
            answer.broken = f"its body is longer than {_BODY_MAX} bytes"
            break
    return bytes(data)


def _take_body(answer: Answer, content_type: str, at_s: float) -> None:
    try:
        body = json.loads(answer.body)
    except ValueError:
        shown = answer.body[:60].decode(errors="replace").split("\n")[0]
        answer.broken = answer.broken or (
            "" if answer.is_refused else f"{content_type} instead of JSON: {shown!r}"
        )
        return
    answer.is_complete = True
    if isinstance(body, dict):
        _take(answer, body, at_s)


def _take_event(answer: Answer, data: bytes, at_s: float) -> None:
    if data == b"[DONE]":
        answer.is_complete = True
        return
    try:
        event = json.loads(data)
    except ValueError:
        answer.broken = f"an event is not JSON: {data[:60].decode(errors='replace')!r}"
        return
    if isinstance(event, dict):
        _take(answer, event, at_s)


def _take(answer: Answer, said: Mapping[str, Any], at_s: float) -> None:
    """Read a body or an event; what has another shape than OpenAI's is passed over."""
    if said.get("error"):
        error = said["error"]
        answer.error = error if isinstance(error, dict) else {"message": str(error)}
    usage = said.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        answer.usage_tokens = usage["completion_tokens"]
    choices = said.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        return
    choice = choices[0]
    answer.finish = choice.get("finish_reason") or answer.finish
    part = choice.get("delta") or choice.get("message")
    names = ("reasoning_content", "content")
    text = "".join(str(part.get(name) or "") for name in names) if isinstance(part, dict) else ""
    if text:
        if answer.texts:
            answer.longest_gap_s = max(answer.longest_gap_s, at_s - answer.last_s)
        answer.first_s, answer.last_s = min(answer.first_s, at_s), at_s
        answer.texts += 1
        answer.text += text
        answer.started.set()
