"""``GET /v2/tasks``: running and ended tasks, without any text that was asked or answered."""

from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from orchestrator.api.http.answer_ids import answer_id
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.finding import status_of
from orchestrator.api.http.forwarding import told_by_siblings
from orchestrator.api.http.responses import json_response
from orchestrator.errors import InvalidRequest
from orchestrator.service import Orchestrator
from orchestrator.slots.job import MODEL
from orchestrator.slots.slot import Slot
from orchestrator.tasks.task import Task

USUAL_LIMIT = 100
MAX = 1000

STATUSES = ("queued", "dispatched", "running", "ended")


async def listing(request: web.Request) -> web.Response:
    """List the caller's tasks, or everybody's for an admin; newest first, ``limit`` of one
    ``status``."""
    status, limit = request.query.get("status"), read_limit(request.query.get("limit"))
    if status is not None and status not in STATUSES:
        raise InvalidRequest(
            f"status must be one of {', '.join(STATUSES)}, got {status[:64]!r}", field="status"
        )
    orchestrator, key = request.app[ORCHESTRATOR], request[CONTEXT].key
    now = orchestrator.clock.now()
    found: list[dict[str, object]] = []
    for one in _newest_first(orchestrator):
        if status is not None and status_of(one) != status:
            continue
        if one.job.key != key.fingerprint and not key.is_admin:
            continue
        if len(found) > limit:
            break
        found.append(_line(one, now) if isinstance(one, Task) else _slot_line(one, now))
    return await listed(request, "tasks", found, limit)


async def listed(
    request: web.Request, name: str, found: Sequence[dict[str, Any]], limit: int
) -> web.Response:
    """The answer with a list under ``name``: the first ``limit`` of what was ``found`` here and by
    the other processes at this port."""
    told = await told_by_siblings(request)
    lines = [*found, *(line for answer in told for line in answer[name])]
    if told:
        lines.sort(key=_place)
    has_more = len(lines) > limit or any(answer["has_more"] for answer in told)
    return json_response({name: lines[:limit], "has_more": has_more})


def _place(line: dict[str, Any]) -> tuple[bool, float]:
    """Sort key of a list's line: work that goes on, then what has ended, each the newest first."""
    has_ended = line["outcome"] is not None
    return has_ended, line["age_ms"] - (line["took_ms"] if has_ended else 0.0)


def _newest_first(orchestrator: Orchestrator) -> Iterator[Task | Slot]:
    """All live tasks and slots, whatever route they came by, then the kept tasks that have
    ended."""
    live: list[Task | Slot] = [*orchestrator.live(), *orchestrator.slots.store.running()]
    yield from sorted(live, key=lambda one: one.marks.received, reverse=True)
    yield from orchestrator.store.ended()


def _line(task: Task, now: float) -> dict[str, object]:
    ending = task.ending
    until = now if ending is None else task.marks.ended
    return {
        "task_id": task.id,
        "api": task.job.api,
        "answer_id": answer_id(task),
        "status": status_of(task),
        "model": task.served_name,
        "correlation_id": task.correlation_id,
        "age_ms": round(1000 * (now - task.marks.received), 1),
        "took_ms": round(1000 * (until - task.marks.received), 1),
        "left_ms": round(task.deadline.left_ms(until), 1),
        "prompt_tokens": task.prompt_tokens,
        "completion_tokens": task.completion_tokens,
        "outcome": None if ending is None else ending.outcome,
        "finish_reason": None if ending is None else ending.finish_reason,
        "code": None if ending is None or ending.error is None else ending.error.code.value,
    }


def _slot_line(slot: Slot, now: float) -> dict[str, object]:
    """A clip that has not ended, in the fields of a task; ``/v2/slots`` has the rest."""
    age_ms = round(1000 * (now - slot.marks.received), 1)
    return {
        "task_id": slot.id,
        "api": "slots",
        "answer_id": slot.id,
        "status": status_of(slot),
        "model": MODEL,
        "correlation_id": slot.job.correlation_id,
        "age_ms": age_ms,
        "took_ms": age_ms,
        "left_ms": round(slot.deadline.left_ms(now), 1),
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "outcome": None,
        "finish_reason": None,
        "code": None,
    }


def read_limit(text: str | None) -> int:
    if text is None:
        return USUAL_LIMIT
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= number <= MAX:
        raise InvalidRequest(
            f"limit must be a whole number from 1 to {MAX}, got {text[:64]!r}", field="limit"
        )
    return number
