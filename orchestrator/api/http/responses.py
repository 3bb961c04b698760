"""Responses of all dialects: whole answers, streams and errors, with headers about deadlines."""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping

import msgspec
from aiohttp import web

from orchestrator.admission.rate_limits import Standing
from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import (
    CONTEXT,
    CORRELATION_HEADER,
    ORCHESTRATOR,
    REQUEST_ID_HEADER,
    Context,
)
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.ignored import IGNORED_HEADER, header_of
from orchestrator.errors import (
    DeadlineExceeded,
    MethodNotAllowed,
    TidegateError,
    Unauthenticated,
    Unavailable,
)
from orchestrator.questions import QueueRoom
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Budget
from orchestrator.tasks.job import Job, Prompt
from orchestrator.tasks.task import Listener, Task
from orchestrator.tasks.transcript import Transcript


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def error_response(error: TidegateError, context: Context, now: float) -> web.Response:
    """The response for an error in the dialect's format. ``now`` is the clock's time."""
    _name_as_sent(error, context.field_names)
    headers = error_headers(error)
    if context.task is not None:
        headers |= task_headers(context.task, now)
    elif context.deadline is not None:
        waited_ms = 1000 * (now - context.arrival.mono)
        due_at = context.deadline.at if error.due_at is None else error.due_at
        left_ms = 1000 * (due_at - now)
        headers["X-Deadline-Budget"] = str(Budget(queue_ms=waited_ms, left_ms=left_ms))
        headers |= deadline_headers(context.deadline)
    dialect = context.dialect
    body = dialect.error_body(error, context.answer_id)
    return json_response(body, status=dialect.status_of(error), headers=headers)


def error_headers(error: TidegateError) -> dict[str, str]:
    """Headers that tell a client what to do, so that it need not read the body."""
    # OpenAI's official SDK uses it.
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, Unavailable) and error.retryable:
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    elif isinstance(error, DeadlineExceeded) and error.exceeded_by_ms is not None:
        headers["X-Deadline-Exceeded-By-Ms"] = f"{error.exceeded_by_ms:.3f}"
    elif isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    return headers


def name_response(response: web.StreamResponse, context: Context) -> None:
    """Add the request's ids and the names of ignored fields to the response."""
    response.headers[CORRELATION_HEADER] = context.correlation_id
    for header in {REQUEST_ID_HEADER, context.dialect.request_id_header}:
        response.headers[header] = context.answer_id
    if ignored := header_of(context.ignored, context.ignored_headers):
        response.headers[IGNORED_HEADER] = ignored


def rate_limit_headers(
    standings: Iterable[Standing], queue: QueueRoom | None = None
) -> dict[str, str]:
    """``x-ratelimit-…`` headers in OpenAI's format. A bounded ``queue`` limits requests too: the
    smaller remaining number is sent. The queue has no reset, because its end is unknown."""
    headers = {}
    if queue is not None:
        headers["x-ratelimit-limit-requests"] = str(queue.bound)
        headers["x-ratelimit-remaining-requests"] = str(queue.left)
    for unit, limit, remaining, reset_s in standings:
        if unit == "requests" and queue is not None and queue.left < remaining:
            continue
        headers[f"x-ratelimit-limit-{unit}"] = str(limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(remaining)
        headers[f"x-ratelimit-reset-{unit}"] = spell_duration(reset_s)
    return headers


def spell_duration(seconds: float) -> str:
    """A duration in the format of OpenAI's reset headers: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def task_headers(task: Task, now: float) -> dict[str, str]:
    """Headers about a task's deadlines so far, for every response about the task (DL-9)."""
    ending = task.ending
    if ending is None:
        budget = task.time_spent.budget(now, task.deadline.left_ms(now))
    else:
        budget = ending.budget
    headers = {"X-Deadline-Budget": str(budget), **deadline_headers(task.deadline)}
    if task.reserved_chance is not None:
        headers["X-Deadline-Reserved"] = f"{task.reserved_chance:g}"
    if task.fitted_tokens is not None:
        headers["X-Fitted-Max-Tokens"] = str(task.fitted_tokens)
    if ending is not None and ending.missed_part is not None:
        headers["X-Deadline-Missed-Part"] = ending.missed_part.value
    return headers


def deadline_headers(deadline: Deadline) -> dict[str, str]:
    """Headers with the source of the effective deadline (DL-20), and with the maximum if the client
    asked for more (DL-1)."""
    headers = {}
    if deadline.source:
        headers["X-Deadline-Source"] = deadline.source
    if deadline.clamped_ms is not None:
        headers["X-Deadline-Clamped-Ms"] = f"{deadline.clamped_ms:.0f}"
    return headers


def task_fields(task: Task) -> dict[str, object]:
    """Additional fields of a response body: a ``max_tokens`` that was reduced to fit the deadline
    (DL-6), and a missed part (DL-14). Empty if neither applies."""
    fields: dict[str, object] = {}
    if task.fitted_tokens is not None:
        fields["fitted_max_tokens"] = task.fitted_tokens
    if task.ending is not None and task.ending.missed_part is not None:
        fields["missed_part"] = task.ending.missed_part.value
    return fields


def _name_as_sent(error: TidegateError, names: Mapping[str, str]) -> None:
    """Replace our name of the wrong field with the client's name."""
    ours = error.field or ""
    if ours in names:
        error.field = names[ours]
        if error.message.startswith((f"{ours} ", f"{ours}:")):
            error.message = error.field + error.message.removeprefix(ours)


async def stream_answer(
    request: web.Request, job: Job, prompt: Prompt, listen: Callable[[EventStream], Listener]
) -> web.StreamResponse:
    """Submit a job. ``listen`` makes the listener that writes the answer to a stream."""
    orchestrator = request.app[ORCHESTRATOR]
    stream = EventStream(request, {}, request.app[CONFIG].keepalive_s)
    listener = listen(stream)
    request[CONTEXT].task = task = await orchestrator.submit(job, prompt, [listener])
    stream.headers |= deadline_headers(task.deadline)
    stream.on_behind = lambda: orchestrator.mark_reading(task, not stream.is_behind)
    try:
        return await stream.run()
    finally:
        task.unlisten(listener)
        orchestrator.disconnected(task, too_slow=stream.too_slow)


async def until_answered(
    request: web.Request, job: Job, prompt: Prompt, listener: Listener, complete: asyncio.Event
) -> Task:
    """Submit a job and wait until ``listener`` sets ``complete``. Raises ``TidegateError``."""
    orchestrator = request.app[ORCHESTRATOR]
    request[CONTEXT].task = task = await orchestrator.submit(job, prompt, [listener])
    try:
        await complete.wait()
    finally:
        task.unlisten(listener)
        orchestrator.disconnected(task)
    assert task.ending is not None
    if task.ending.error is not None:
        raise task.ending.error
    return task


class _WholeAnswer(Transcript):
    def __init__(self, begin: Callable[[Task], None]) -> None:
        super().__init__()
        self.complete = asyncio.Event()
        self._begin = begin

    def started(self, task: Task) -> None:  # type: ignore[override]  # it hears tasks only
        self._begin(task)

    def ended(self, task: Task) -> None:  # type: ignore[override]
        self.complete.set()


async def whole_answer(
    request: web.Request,
    job: Job,
    prompt: Prompt,
    begin: Callable[[Task], None] = lambda task: None,
) -> tuple[Task, Transcript]:
    """Submit a job and wait for all its tokens and texts. The ending has the text's ``tail``.
    ``begin`` is called once the prompt is known. Raises ``TidegateError`` if the job fails."""
    answer = _WholeAnswer(begin)
    return await until_answered(request, job, prompt, answer, answer.complete), answer
