"""``GET /v2/tasks``: what runs and what was, without a word of what was asked or answered."""

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.task import Stage, Task

USUAL_LIMIT = 100
MOST = 1000

STATUSES = ("queued", "dispatched", "running", "ended")


async def listing(request: web.Request) -> web.Response:
    """The caller's tasks, or an admin's everybody's; newest first, ``limit`` of one ``status``."""
    status, limit = request.query.get("status"), read_limit(request.query.get("limit"))
    if status is not None and status not in STATUSES:
        raise InvalidRequest(
            f"status must be one of {', '.join(STATUSES)}, got {status[:64]!r}", field="status"
        )
    orchestrator, key = request.app[ORCHESTRATOR], request[CONTEXT].key
    now = orchestrator.clock.now()
    found: list[dict[str, object]] = []
    for task in orchestrator.store.newest_first():
        if status is not None and status_of(task) != status:
            continue
        if task.job.key != key.fingerprint and not key.is_admin:
            continue
        if len(found) == limit:
            return json_response({"tasks": found, "has_more": True})
        found.append(_line(task, now))
    return json_response({"tasks": found, "has_more": False})


def status_of(task: Task) -> str:
    """How far it got, in the words of this API."""
    return "queued" if task.stage <= Stage.QUEUED else task.stage.name.lower()


def _line(task: Task, now: float) -> dict[str, object]:
    ending = task.ending
    until = now if ending is None else task.marks.ended
    return {
        "task_id": task.id,
        "status": status_of(task),
        "model": task.model,
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


def read_limit(text: str | None) -> int:
    if text is None:
        return USUAL_LIMIT
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= number <= MOST:
        raise InvalidRequest(
            f"limit must be a whole number from 1 to {MOST}, got {text[:64]!r}", field="limit"
        )
    return number
