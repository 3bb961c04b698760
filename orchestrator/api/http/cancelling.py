"""Cancelling by any id that was shown, on whichever route shows it (OR-21, WP-2)."""

import asyncio
from collections.abc import Sequence

from aiohttp import web

from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.elsewhere import told_by_siblings
from orchestrator.api.http.finding import find_in_rooms, find_tasks, status_of
from orchestrator.api.http.responses import json_response
from orchestrator.errors import Draining, NotFound
from orchestrator.tasks.task import Task


async def cancel(request: web.Request) -> web.Response:
    """Cancel what goes by an id; 202 whether it ran, had ended or was cancelled before (WP-2)."""
    name, orchestrator = request.match_info["task_id"], request.app[ORCHESTRATOR]
    found = find_in_rooms(request, name)
    for room, work in found:
        room.cancel(work)
    # An id leads to its holder; work of one correlation id may be in all processes of a port.
    is_anyones = not orchestrator.sharing.is_of_member(name)
    elsewhere = await told_by_siblings(request) if is_anyones else []
    try:
        tasks = await cancel_tasks(request, name)
    except NotFound:
        if not found and not elsewhere:
            raise
        tasks = []
    stopped = [(task.id, status_of(task), task.correlation_id) for task in tasks]
    stopped += [(work.id, "ended", work.correlation_id) for _, work in found]
    answers = elsewhere
    if stopped:
        task_id, status, correlation_id = stopped[0]
        answer = {"task_id": task_id, "status": status, "correlation_id": correlation_id}
        answers = [answer | {"task_ids": [each[0] for each in stopped]}, *elsewhere]
    ids = dict.fromkeys(task_id for answer in answers for task_id in answer["task_ids"])
    return json_response(answers[0] | {"task_ids": list(ids)}, status=202)


async def cancel_tasks(request: web.Request, name: str) -> Sequence[Task]:
    """Cancel the tasks that go by ``name``, for their own key or an admin's. Raises
    ``NotFound``."""
    tasks = await find_tasks(request, name)
    for task in tasks:
        request.app[ORCHESTRATOR].cancel(task)
    for task in tasks:
        await recorded(task)
    return tasks


async def recorded(task: Task) -> None:
    """Wait until a durable task's outcome is on the disk, before anybody is told of it. Raises
    ``Draining`` where the task is left to the next process."""
    if task.entry is not None and task.ending is not None:
        written = asyncio.Event()
        if not task.entry.is_left:
            task.entry.when_recorded(written.set)
            await written.wait()
        if task.entry.is_left:
            raise Draining("the task goes on in another process; ask again in a moment")
