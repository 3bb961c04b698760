"""Answers and errors as every dialect sends them: JSON, and headers that tell of deadlines."""

import math
from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web

from orchestrator.admission.rate_limits import Standing
from orchestrator.api.http.context import (
    CORRELATION_HEADER,
    REQUEST_ID_HEADER,
    Context,
)
from orchestrator.api.http.ignored import IGNORED_HEADER, header_of
from orchestrator.errors import (
    DeadlineExceeded,
    MethodNotAllowed,
    TidegateError,
    Unauthenticated,
    Unavailable,
)
from orchestrator.service import QueueRoom
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Budget
from orchestrator.tasks.task import Task


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
    """Answer an error with the dialect's body and headers; ``now`` is on the clock."""
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
    """Headers from which a client can tell what to do without reading the body."""
    # The official OpenAI SDK honors it.
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
    """Add the request's ids to its answer, and the names of what was ignored."""
    response.headers[CORRELATION_HEADER] = context.correlation_id
    for header in {REQUEST_ID_HEADER, context.dialect.request_id_header}:
        response.headers[header] = context.answer_id
    if ignored := header_of(context.ignored, context.ignored_headers):
        response.headers[IGNORED_HEADER] = ignored


def rate_limit_headers(
    standings: Iterable[Standing], queue: QueueRoom | None = None
) -> dict[str, str]:
    """``x-ratelimit-…`` headers as OpenAI spells them. A bounded ``queue`` limits requests too,
    and whichever leaves fewer is reported; when a queue will be empty is not known, so it has no
    reset."""
    headers = {}
    if queue is not None:
        headers["x-ratelimit-limit-requests"] = str(queue.bound)
        headers["x-ratelimit-remaining-requests"] = str(queue.left)
    for unit, per_min, remaining, reset_s in standings:
        if unit == "requests" and queue is not None and queue.left < remaining:
            continue
        headers[f"x-ratelimit-limit-{unit}"] = str(per_min)
        headers[f"x-ratelimit-remaining-{unit}"] = str(remaining)
        headers[f"x-ratelimit-reset-{unit}"] = spell_duration(reset_s)
    return headers


def spell_duration(seconds: float) -> str:
    """A duration as OpenAI's reset headers spell it: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def task_headers(task: Task, now: float) -> dict[str, str]:
    """Headers on a task's deadlines so far, for every answer about the task (DL-9)."""
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
    """Headers that name the deadline which counts, of all that were stated (DL-20), and the maximum
    where the client asked for more (DL-1)."""
    headers = {}
    if deadline.source:
        headers["X-Deadline-Source"] = deadline.source
    if deadline.clamped_ms is not None:
        headers["X-Deadline-Clamped-Ms"] = f"{deadline.clamped_ms:.0f}"
    return headers


def task_fields(task: Task) -> dict[str, object]:
    """Additional fields of a body: a ``max_tokens`` that was reduced to fit the deadline (DL-6),
    and a part that was missed (DL-14). Empty where neither applies."""
    fields: dict[str, object] = {}
    if task.fitted_tokens is not None:
        fields["fitted_max_tokens"] = task.fitted_tokens
    if task.ending is not None and task.ending.missed_part is not None:
        fields["missed_part"] = task.ending.missed_part.value
    return fields


def _name_as_sent(error: TidegateError, names: Mapping[str, str]) -> None:
    """Name the wrong field as the client knows it."""
    ours = error.field or ""
    if ours in names:
        error.field = names[ours]
        if error.message.startswith((f"{ours} ", f"{ours}:")):
            error.message = error.field + error.message.removeprefix(ours)
