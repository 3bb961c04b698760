"""``GET /v2/tasks``: running and ended tasks, without their prompts and answers."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.fields import read_limit
from orchestrator.api.http.finding import answer_id, status_of
from orchestrator.api.http.responses import json_response
from orchestrator.service import Orchestrator
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork

W = TypeVar("W", bound=AnyWork)

USUAL_LIMIT = 100
MAX = 1000

STATUSES = ("queued", "dispatched", "running", "ended")


async def listing(request: web.Request) -> web.Response:
    """List the caller's tasks (an admin's: all), newest first; by ``status`` and ``limit``."""
    orchestrator = request.app[ORCHESTRATOR]
    return await listed(request, "tasks", _newest_first(orchestrator), _line)


async def listed(
    request: web.Request,
    name: str,
    works: Iterable[W],
    line: Callable[[W, float], dict[str, object]],
) -> web.Response:
    """A response with a list in the field ``name``. It has a ``line`` for each of ``works`` that
    matches the query and that the caller may see."""
    status, limit = request.query.get("status"), read_limit(request.query, USUAL_LIMIT, MAX)
    if status is not None and status not in STATUSES:
        raise must("status", f"be one of {', '.join(STATUSES)}, got {status[:64]!r}")
    key, now = request[CONTEXT].key, request.app[ORCHESTRATOR].clock.now()
    found: list[dict[str, Any]] = []
    for work in works:
        is_asked_for = status is None or status_of(work) == status
        if is_asked_for and (key.is_admin or work.job.key == key.fingerprint):
            found.append(line(work, now))
            if len(found) > limit:
                break
    return json_response({name: found[:limit], "has_more": len(found) > limit})


def _newest_first(orchestrator: Orchestrator) -> Iterator[AnyWork]:
    """All live work of every route, then the kept ended tasks."""
    live: list[AnyWork] = [*orchestrator.live()]
    live += [work for room in orchestrator.rooms for work in room.live()]
    yield from sorted(live, key=lambda one: one.marks.received, reverse=True)
    yield from orchestrator.store.ended()


def standing(work: AnyWork, now: float) -> dict[str, object]:
    """The common fields of lines for all kinds of work."""
    ending = work.ending
    until = now if ending is None else work.marks.ended
    return {
        "status": status_of(work),
        "correlation_id": work.correlation_id,
        "age_ms": round(1000 * (now - work.marks.received), 1),
        "took_ms": round(1000 * (until - work.marks.received), 1),
        "left_ms": round(work.deadline.left_ms(until), 1),
        "outcome": None if ending is None else ending.outcome,
        "code": None if ending is None or ending.error is None else ending.error.code.value,
    }


def _line(work: AnyWork, now: float) -> dict[str, object]:
    """A task or an optional room's work, with the fields of a task."""
    ending = work.ending
    return {
        "task_id": work.id,
        "api": work.job.api if isinstance(work, Task) else f"{work.what}s",
        "answer_id": answer_id(work) if isinstance(work, Task) else work.id,
        "model": work.served_name,
        "prompt_tokens": work.prompt_tokens if isinstance(work, Task) else 0,
        "completion_tokens": work.completion_tokens if isinstance(work, Task) else 0,
        "finish_reason": None if ending is None else ending.finish_reason,
        **standing(work, now),
    }
