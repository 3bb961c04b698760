"""The server under test: requests and their answers, and its pace, from which times are derived.

Every request ends, even if the server hangs: the client closes the connection at ``limit_s``.
"""

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import aiohttp

from .target import Target

_STORY: Final = "Tell me a long story about a fox and a lighthouse."
_EVENTS: Final = "text/event-stream"
_LONE, _FEWEST, _MOST = 32, 16, 128
"""Tokens of a lone answer, and bounds of a short one's."""
_WORTH, _VAIN = 1.15, 2
"""More streams are taken for as long as a doubling, or the next one, makes at least so many times
the tokens: one wave alone may have met a busy moment."""
_SLACK_S, _FAR_S = 0.1, 120.0
"""For network and scheduling; a deadline that an answer of some tokens meets anywhere."""


class Unusable(Exception):
    """The server cannot be tested at all; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured at most: ``streams`` at once, ``longest`` tokens of an answer,
    ``patience`` in seconds with a silent server, ``seconds`` of a run. Times adapt to the server's
    pace above a short answer's (``wave_s``, about) and ``least_deadline_s``."""

    rounds: int = 3
    wave_s: float = 0.5
    least_deadline_s: float = 0.5
    longest: int = 1000
    patience: float = 30.0
    streams: int = 64
    seconds: float = 600.0


@dataclass(slots=True)
class Answer:
    """The complete response. Times are seconds since the request was sent; ``inf`` means never.
    ``texts`` are events that had text; ``is_complete``: a whole body, or a stream with its
    ``[DONE]``; ``is_hung_up``: this client closed the connection before the end; ``broken`` says
    why the response cannot be read; ``started`` is set with the first text or the end."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    first_s: float = math.inf
    last_s: float = 0.0
    end_s: float = math.inf
    longest_gap_s: float = 0.0
    texts: int = 0
    usage_tokens: int | None = None
    finish: str = ""
    error: Mapping[str, Any] | None = None
    is_complete: bool = False
    is_hung_up: bool = False
    broken: str = ""
    body: bytes = b""
    started: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    task: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens received: the server's count, otherwise one per event with text."""
        return self.texts if self.usage_tokens is None else self.usage_tokens

    @property
    def is_refused(self) -> bool:
        return self.status >= 400

    @property
    def is_error(self) -> bool:
        return self.is_refused or self.error is not None

    @property
    def is_well(self) -> bool:
        return self.status == 200 and self.error is None and not self.broken and self.is_complete

    @property
    def is_whole(self) -> bool:
        """Whether it is a complete answer, ended by the model or by ``max_tokens``."""
        return self.is_well and self.finish in ("stop", "length")

    @property
    def has_error_object(self) -> bool:
        """Whether an error has OpenAI's form."""
        return self.error is not None and isinstance(self.error.get("message"), str)

    @property
    def gap_s(self) -> float:
        """Time per token; of a stream that came all at once, with the wait before it."""
        after_first_s, tokens = self.last_s - self.first_s, max(1, self.tokens)
        if tokens > 1 and after_first_s > 0.2 * self.last_s:
            return max(1e-5, after_first_s / (tokens - 1))
        return max(1e-5, self.last_s / tokens)

    def outcome(self) -> str:
        """A short description of the outcome."""
        if self.is_hung_up:
            return f"no end within {self.end_s:.3g} s"
        if self.broken:
            return self.broken
        if self.is_error:
            told = str((self.error or {}).get("message", "")) or self.body.decode(errors="replace")
            return f"status {self.status}: {' '.join(told.split())[:200] or 'no body'}"
        return f"status {self.status}, {self.tokens} tokens, finish_reason {self.finish or 'none'}"

    def take(self, data: bytes, at_s: float, kind: str) -> None:
        """Read a body or an event; data in a form other than OpenAI's is skipped."""
        try:
            said = json.loads(data)
        except ValueError:
            if not self.is_refused:
                shown = data[:60].decode(errors="replace").split("\n")[0]
                what = "an event is not JSON" if kind == _EVENTS else f"{kind} instead of JSON"
                self.broken = f"{what}: {shown!r}"
            return
        self.is_complete = kind != _EVENTS
        match said:
            case {"error": error} if error:
                self.error = error if isinstance(error, dict) else {"message": str(error)}
        match said:
            case {"usage": {"completion_tokens": int(count)}}:
                self.usage_tokens = count
        match said:
            case {"choices": [{} as choice, *_]}:
                self.finish = choice.get("finish_reason") or self.finish
                text = {"content": choice.get("text")}
                part = choice.get("delta") or choice.get("message") or text
                names = ("reasoning_content", "content")
                if isinstance(part, dict) and any(part.get(name) for name in names):
                    gap_s = at_s - self.last_s if self.texts else 0.0
                    self.longest_gap_s = max(self.longest_gap_s, gap_s)
                    self.first_s, self.last_s = min(self.first_s, at_s), at_s
                    self.texts += 1
                    self.started.set()


class Server:
    """Sends requests to one target. ``fields`` make answers as long as asked for, where the server
    takes them. The pace, once measured: alone, the time to the first text and per token, the
    longest gap between texts, tokens of a short answer and of the longest one that it takes; at its
    capacity of ``streams``, its tokens a second, and an answer's time and longest gap."""

    first_s = gap_s = longest_gap_s = tokens_per_s = answer_s = busy_gap_s = 0.0
    short = longest = streams = 0

    def __init__(self, http: aiohttp.ClientSession, target: Target, effort: Effort) -> None:
        self.target = target
        self.effort = effort
        self.patience_s = effort.patience
        self.clock = asyncio.get_running_loop().time
        self.fields: dict[str, Any] = {"ignore_eos": True}
        self.name = ""
        self.used = 0
        self.began = self.clock()
        self._http = http

    @property
    def left_s(self) -> float:
        """Seconds left of the run, at least 0."""
        return max(0.0, self.began + self.effort.seconds - self.clock())

    @property
    def out_of_time(self) -> str:
        return f"the run's bound of {self.effort.seconds:g} s was reached; --seconds widens it"

    def begin(
        self,
        tokens: int,
        limit_s: float,
        *,
        stream: bool = True,
        told: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Ask for an answer of ``tokens``, which fills as it comes in; ``told`` is the deadline as
        the request states it, ``more`` further fields."""
        target, headers = self.target, dict[str, str]()
        body: dict[str, Any] = {"model": target.model, "max_tokens": tokens, "temperature": 1.0}
        body |= {"stream": stream, **self.fields, **(more or {})}
        if target.is_chat:
            body["messages"] = [{"role": "user", "content": _STORY}]
        else:
            body["prompt"] = _STORY
        if stream:
            body["stream_options"] = {"include_usage": True}
        if told is not None:
            target.deadline.put(told, headers, body)
        if target.key:
            headers["Authorization"] = f"Bearer {target.key}"
        url = target.url.rstrip("/") + ("/chat/completions" if target.is_chat else "/completions")
        asked = {"url": url, "json": body, "headers": headers}
        self.used += 1
        answer = Answer()
        answer.task = asyncio.ensure_future(self._ask(answer, limit_s, asked))
        return answer

    async def chat(self, tokens: int, limit_s: float, **asked: Any) -> Answer:
        """Ask as ``begin`` does, and wait. Raises ``Unusable``."""
        return (await together([self.begin(tokens, limit_s, **asked)]))[0]

    async def _ask(self, answer: Answer, limit_s: float, asked: dict[str, Any]) -> None:
        began, limit = self.clock(), asyncio.timeout(limit_s)
        try:
            async with limit, self._http.post(**asked) as response:
                try:
                    await self._read(response, answer, began)
                finally:
                    if not response.content.is_eof():
                        response.close()
        except aiohttp.ClientConnectorError as error:
            where = f"{self.target.url}: {error.os_error.strerror or error}"
            hint = "is the server running, and is this its base URL?"
            raise Unusable(f"nobody answers at {where}; {hint}") from error
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
        kind, data = response.content_type, b""
        async for part in response.content.iter_any():
            data += part
            *lines, data = data.split(b"\n") if kind == _EVENTS else [data]
            for line in lines:
                if line.startswith(b"data:") and not answer.is_complete:
                    event = line[5:].strip()
                    if event == b"[DONE]":
                        answer.is_complete = True
                    else:
                        answer.take(event, self.clock() - began, kind)
            if answer.broken or answer.is_complete:
                return
        if kind != _EVENTS:
            answer.body = data
            answer.take(data, self.clock() - began, kind)
        elif not answer.error:
            answer.broken = "its event stream has no [DONE]"

    @property
    def tolerance_s(self) -> float:
        return _SLACK_S + 3 * self.longest_gap_s

    @property
    def busy_tolerance_s(self) -> float:
        return _SLACK_S + 3 * max(self.longest_gap_s, self.busy_gap_s)

    def pace(self) -> dict[str, float]:
        names = ("first_s", "gap_s", "longest_gap_s", "busy_gap_s", "short", "longest", "streams")
        return {name: getattr(self, name) for name in (*names, "tokens_per_s", "answer_s")}

    def cut_s(self) -> float:
        """A deadline that cuts the longest answer after some text. Raises ``Unusable``."""
        wanted_s = max(self.effort.least_deadline_s, 3 * self.first_s + 20 * self.gap_s)
        longest_s = self.first_s + self.longest * self.gap_s
        if (cut_s := min(wanted_s, longest_s / 3)) < self.first_s + 2 * self.gap_s:
            why = "too little to be cut by a deadline"
            raise Unusable(f"its longest answer takes {longest_s:.3g} s, {why}")
        return round(cut_s, 3)  # what headers can say

    async def one(self, told: str) -> Answer:
        """A short answer."""
        return await self.chat(self.short, self.patience_s, told=told)

    async def wave(self) -> float:
        """Seconds that a set of short streams takes, one on each stream of the capacity; in
        proportion where some were not served, as long as this run waits where none was."""
        began = self.clock()
        whole = sum(answer.is_whole for answer in await self._wave(self.streams))
        return (self.clock() - began) * self.streams / whole if whole else self.patience_s

    async def _wave(self, count: int) -> list[Answer]:
        return await together(self.begin(self.short, self.patience_s) for _ in range(count))

    async def settle(self, limit_s: float) -> float:
        """Seconds until a lone request is about as fast as at first; ``inf`` after ``limit_s``."""
        began, normal_s = self.clock(), 2 * self.first_s + self.tolerance_s
        while (passed_s := self.clock() - began) < limit_s:
            answer = await self.chat(1, limit_s - passed_s)
            took_s = min(answer.first_s, answer.end_s)
            if answer.is_whole and took_s <= normal_s:
                return max(0.0, self.clock() - began - took_s)
            if not answer.is_whole:
                await asyncio.sleep(normal_s)
        return math.inf

    async def measure(self) -> None:
        """See that the server can be tested, and measure its pace. Raises ``Unusable``."""
        await self._look()
        await self._see_longest()  # first: the one hung up may take a while to end
        lone = [await self._lone() for _ in range(1 + self.effort.rounds)][1:]
        self.first_s, self.gap_s = median(a.first_s for a in lone), median(a.gap_s for a in lone)
        self.longest_gap_s = max(answer.longest_gap_s for answer in lone)
        short = min(_MOST, max(_FEWEST, round(self.effort.wave_s / self.gap_s)))
        self.short = min(short, self.longest)
        await self._see_capacity()

    async def _look(self) -> None:
        answer = await self.chat(8, self.patience_s, stream=False)
        self.name = answer.headers.get("Server", "")
        if answer.status in (400, 422) and self.fields:
            self.fields = {}  # it refuses what it does not know: its answers end by themselves
            answer = await self.chat(8, self.patience_s, stream=False)
        if answer.status in (401, 403):
            raise Unusable(f"the server wants another key: {answer.outcome()}")
        if not answer.is_whole:
            hint = "; is the base URL that of an OpenAI API, with /v1?" if answer.broken else ""
            model = f"model {self.target.model!r}"
            raise Unusable(f"a chat of 8 tokens with {model}: {answer.outcome()}{hint}")
        if self.target.deadline.is_told:
            far = self.target.deadline.said(_FAR_S)
            answer = await self.chat(8, self.patience_s, stream=False, told=far)
            if not answer.is_whole:
                said = f"said by '{self.target.deadline}': {answer.outcome()}"
                said += "; is it said as this server expects?"
                raise Unusable(f"a chat of 8 tokens with a deadline of {_FAR_S:g} s, {said}")

    async def _lone(self) -> Answer:
        answer = await self.chat(_LONE, self.patience_s)
        if not answer.is_whole or not answer.texts:
            raise Unusable(f"a streamed chat of {_LONE} tokens: {answer.outcome()}")
        return answer

    async def _see_longest(self) -> None:
        self.longest = self.effort.longest
        while self.longest > _LONE:
            answer = self.begin(self.longest, self.patience_s)
            try:
                await answer.started.wait()
            finally:
                await hang_up([answer])
            if not answer.is_refused:
                return
            self.longest //= 2

    async def _see_capacity(self) -> None:
        count, in_vain = 1, 0
        while count <= self.effort.streams and in_vain < _VAIN:
            began, answers = self.clock(), await self._wave(count)
            rate = sum(answer.tokens for answer in answers) / (self.clock() - began)
            if not all(answer.is_whole for answer in answers):
                if self.streams:
                    return
                raise Unusable(f"a streamed chat of {self.short} tokens: {answers[0].outcome()}")
            in_vain += 1
            if rate >= _WORTH * self.tokens_per_s:
                self.streams, self.tokens_per_s, in_vain = count, rate, 0
                self.answer_s = median(answer.end_s for answer in answers)
                self.busy_gap_s = median(answer.longest_gap_s for answer in answers)
            count *= 2


async def together(answers: Iterable[Answer]) -> list[Answer]:
    """Answers of requests that run at once. Raises ``Unusable`` if one could not be sent."""
    listed = list(answers)
    try:
        await asyncio.gather(*(answer.task for answer in listed if answer.task is not None))
        return listed
    finally:
        await hang_up(listed)


async def hang_up(answers: Iterable[Answer]) -> None:
    """Close the connections."""
    tasks = [answer.task for answer in answers if answer.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
