"""The asynchronous client of Tidegate's native API."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import aiohttp
import msgspec

from tidegate.errors import (
    ApiError,
    ConnectFailed,
    ProtocolError,
    StreamLost,
    TidegateError,
    Unavailable,
    error_class,
)
from tidegate.results import (
    EVENT_TYPES,
    End,
    Event,
    Failed,
    Generation,
    Submitted,
    TaskStatus,
    Token,
)
from tidegate.sse import EventTooLarge, ServerSentEvent, SseParser

DEFAULT_BASE_URL = "http://127.0.0.1:8080"
_CONNECT_S = 10.0
_CALL_S = 30.0
"""Every call but the event stream is answered at once."""
_CANCEL_WAIT_S = 2.0
_RECONNECT_FIRST_S = 0.1
_RECONNECT_MOST_S = 2.0
_AFTER_DEADLINE_S = 1.0
"""The terminal event that tells of a missed deadline is worth waiting for this long."""
_LONGEST_TASK_S = 1800.0
"""The server clamps deadlines to this (DL-1), so no stream is silent for longer."""

Deadline = timedelta | float
"""Relative to now; a number is milliseconds."""

_DEADLINE_OPTIONS = ("deadline", "first_token", "token_gap")

_T = TypeVar("_T")


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class TaskOptions(TypedDict, total=False):
    """What a task may ask for besides its prompt; the server has a default for each.

    ``first_token`` is a deadline for that alone; then one more token is due every ``token_gap``.
    """

    model: str
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    seed: int
    stop: str | Sequence[str]
    logprobs: int
    on_deadline: Literal["error", "partial"]
    on_disconnect: Literal["cancel", "continue"]
    deadline: Deadline
    first_token: Deadline
    token_gap: Deadline


Prompt = str | Sequence[Message] | Sequence[int]
"""Text, the turns of a conversation, or token ids."""


class Client:
    """A client of one orchestrator; close it, or use it as ``async with``.

    ``reconnect_for`` bounds how long a broken event stream is retried for a task without a
    deadline of its own.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        token: str | None = None,
        reconnect_for: timedelta = timedelta(seconds=30),
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._base_url = base_url.rstrip("/")
        self._reconnect_for_s = reconnect_for.total_seconds()
        self._jitter = random.Random()
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=_CALL_S, sock_connect=_CONNECT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Tasks go on as their ``on_disconnect`` says."""
        await self._http.close()

    # ── the API, call by call ────────────────────────────────────────────────────────────────

    async def models(self) -> list[str]:
        """Names of the models that are served."""
        body = await self._call("GET", "/v1/models", dict[str, Any])
        try:
            return [str(entry["id"]) for entry in body["data"]]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"/v1/models answered without a list of models: {body}") from error

    async def submit(self, prompt: Prompt, **options: Unpack[TaskOptions]) -> Submitted:
        """Hand in a task and return at once. Raises ``ApiError`` when it is refused."""
        return await self._call("POST", "/v2/tasks", Submitted, json=_task_body(prompt, options))

    async def status(self, task_id: str) -> TaskStatus:
        """The task as it stands."""
        return await self._call("GET", f"/v2/tasks/{task_id}", TaskStatus)

    async def cancel(self, task_id: str) -> None:
        """Stop a task. Idempotent; returns when the server has taken note, in a step it stops."""
        await self._send("POST", f"/v2/tasks/{task_id}/cancel")

    async def events(
        self,
        task_id: str,
        *,
        last_event_id: str = "",
        deadline: Deadline | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Events of a task, from the beginning or after ``last_event_id``, to its terminal one.

        A connection that breaks is opened again where it broke, without a lost or repeated event,
        until ``deadline`` (or ``reconnect_for`` after the last sign of life); then ``StreamLost``
        is raised. A task that failed yields ``Failed`` rather than raising.
        """
        loop = asyncio.get_running_loop()
        last_sign = loop.time()
        longest_s = _LONGEST_TASK_S if deadline is None else to_seconds(deadline)
        give_up_at = last_sign + longest_s + _AFTER_DEADLINE_S
        parser = SseParser(last_event_id)
        attempt = 0
        while True:
            trouble = "the server ended the stream without a terminal event"
            try:
                parser = SseParser(parser.last_event_id)
                async with (
                    self._open_events(task_id, parser.last_event_id, give_up_at) as response,
                    aclosing(_read_events(response, parser)) as received,
                ):
                    async for event in received:
                        last_sign, attempt = loop.time(), 0
                        yield event
                        if isinstance(event, End | Failed):
                            return
            except Unavailable as error:
                trouble = str(error)
            except ApiError:
                raise
            except (aiohttp.ClientError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
            pause = self._reconnect_pause_s(attempt, parser.retry_ms)
            limit = last_sign + self._reconnect_for_s if deadline is None else give_up_at
            if loop.time() + pause > min(limit, give_up_at):
                raise StreamLost(task_id, f"lost the events of task {task_id}: {trouble}")
            await asyncio.sleep(pause)
            attempt += 1

    # ── the same, made comfortable ───────────────────────────────────────────────────────────

    async def stream(
        self, prompt: Prompt, **options: Unpack[TaskOptions]
    ) -> AsyncGenerator[Event, None]:
        """Submit a task and yield its events; a task that ends badly raises its ``ApiError``.

        Closing the generator early, or cancelling the coroutine that reads it, cancels the task:
        use ``contextlib.aclosing`` where a loop may be left by ``break``.
        """
        submitting = asyncio.ensure_future(self.submit(prompt, **options))
        try:
            submitted = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            await self._stop(submitting)  # the server may have taken it on all the same
            raise
        ended = False
        try:
            async with aclosing(
                self.events(submitted.task_id, deadline=options.get("deadline"))
            ) as events:
                async for event in events:
                    ended = isinstance(event, End | Failed)
                    if isinstance(event, Failed):
                        raise error_class(event.code, None)(
                            event.message,
                            code=event.code,
                            retryable=event.retryable,
                            task_id=submitted.task_id,
                        )
                    yield event
        finally:
            if not ended:
                await self._stop(submitting)

    async def generate(self, prompt: Prompt, **options: Unpack[TaskOptions]) -> Generation:
        """Submit a task and wait for its whole text."""
        texts: list[str] = []
        token_ids: list[int] = []
        async with aclosing(self.stream(prompt, **options)) as events:
            async for event in events:
                if isinstance(event, Token):
                    texts.append(event.text)
                    token_ids.extend(event.token_ids)
                elif isinstance(event, End):
                    return Generation(
                        text="".join(texts),
                        token_ids=tuple(token_ids),
                        outcome=event.outcome,
                        finish_reason=event.finish_reason,
                        usage=event.usage,
                        budget=event.budget,
                        missed_part=event.missed_part,
                    )
        raise ProtocolError("the stream ended without a terminal event")

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    async def _stop(self, submitting: asyncio.Future[Submitted]) -> None:
        """Cancel a task that nobody will read, as well as that can be done in little time."""
        with suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(_CANCEL_WAIT_S):
                await self.cancel((await submitting).task_id)

    async def _call(
        self, method: str, path: str, result: type[_T], json: Mapping[str, Any] | None = None
    ) -> _T:
        body = await self._send(method, path, json)
        try:
            return msgspec.json.decode(body, type=result)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{method} {path}: unexpected body: {error}") from error

    async def _send(self, method: str, path: str, json: Mapping[str, Any] | None = None) -> bytes:
        try:
            async with self._http.request(method, self._base_url + path, json=json) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise ConnectFailed(f"no answer from {self._base_url}: {reason}") from error
        if response.status >= 400:
            raise _api_error(response, body)
        return body

    @asynccontextmanager
    async def _open_events(
        self, task_id: str, last_event_id: str, give_up_at: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        url = f"{self._base_url}/v2/tasks/{task_id}/events"
        left_s = max(give_up_at - asyncio.get_running_loop().time(), 0.001)
        timeout = aiohttp.ClientTimeout(total=left_s, sock_connect=_CONNECT_S)
        async with self._http.get(url, headers=headers, timeout=timeout) as response:
            if response.status >= 400:
                raise _api_error(response, await response.read())
            if response.content_type != "text/event-stream":
                raise ProtocolError(f"{url} answered with {response.content_type}, not events")
            yield response

    def _reconnect_pause_s(self, attempt: int, retry_ms: int | None) -> float:
        first = _RECONNECT_FIRST_S if retry_ms is None else retry_ms / 1000
        return min(first * 2.0**attempt, _RECONNECT_MOST_S) * self._jitter.uniform(0.5, 1.0)


async def _read_events(
    response: aiohttp.ClientResponse, parser: SseParser
) -> AsyncGenerator[Event, None]:
    async for chunk in response.content.iter_any():
        try:
            received = parser.feed(chunk)
        except EventTooLarge as error:
            raise ProtocolError(str(error)) from error
        for event in received:
            typed = _typed(event)
            if typed is not None:
                yield typed


def _typed(event: ServerSentEvent) -> Event | None:
    """The event as its type; None for a name that this client does not know."""
    event_type = EVENT_TYPES.get(event.event)
    if event_type is None:
        return None
    try:
        return msgspec.json.decode(event.data, type=event_type)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"event {event.event!r} has an unexpected body: {error}") from error


def _task_body(prompt: Prompt, options: TaskOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        key: value for key, value in options.items() if key not in _DEADLINE_OPTIONS
    }
    if "deadline" in options:
        body["deadline_ms"] = round(to_seconds(options["deadline"]) * 1000)
    # A gap may well be a fraction of a millisecond, and nothing rounded to 0 is accepted.
    if "first_token" in options:
        body["first_token_ms"] = to_seconds(options["first_token"]) * 1000
    if "token_gap" in options:
        body["token_gap_ms"] = to_seconds(options["token_gap"]) * 1000
    if isinstance(prompt, str):
        body["prompt"] = prompt
    elif prompt and isinstance(prompt[0], int):
        body["prompt_token_ids"] = list(prompt)
    else:
        body["messages"] = list(prompt)
    return body


def to_seconds(deadline: Deadline) -> float:
    """A relative deadline in seconds."""
    return deadline.total_seconds() if isinstance(deadline, timedelta) else deadline / 1000


def _api_error(response: aiohttp.ClientResponse, body: bytes) -> ApiError:
    """The server's refusal as an exception, whatever wrote it (a proxy's HTML included)."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        parsed = None
    fields = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    if not isinstance(fields, dict):
        fields = {"message": body[:200].decode("utf-8", "replace") or response.reason}
    code = str(fields.get("code") or f"http_{response.status}")
    return error_class(code, response.status)(
        str(fields.get("message") or response.reason or code),
        code=code,
        status=response.status,
        retryable=bool(fields.get("retryable", response.status in (429, 503))),
        retry_after_s=_retry_after_s(response),
        details={k: v for k, v in fields.items() if k not in ("code", "message", "retryable")},
    )


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    with suppress(ValueError):
        if "retry-after-ms" in response.headers:
            return float(response.headers["retry-after-ms"]) / 1000
        if "Retry-After" in response.headers:
            return float(response.headers["Retry-After"])
    return None
