"""Finds and cancels tasks by the client's ids: in this process, in the journal of an earlier
process, or in another process.

An orchestrator with shared state forwards unknown ids to their owner
(``orchestrator.state.forwarding``).
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.errors import (
    Draining,
    JournalUnavailable,
    KeyReused,
    NotFound,
    TidegateError,
)
from orchestrator.extension import Extension
from orchestrator.retention import no_such
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.records import TaskRow, ended_task
from orchestrator.tasks.journal.store import Question
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork, Stage

ID_PREFIXES = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETIONS: "cmpl-",
    Api.RESPONSES: "resp_",
    Api.MESSAGES: "msg_",
}


def answer_id(task: Task) -> str:
    """Id of the client's answer. All choices of a request have the same answer id."""
    return ID_PREFIXES.get(task.job.api, "") + task.leader_id


async def find_task(request: web.Request) -> Task:
    """The task in the request's path, for its own key or an admin key. Raises ``NotFound``."""
    return (await find_tasks(request, request.match_info["task_id"]))[0]


async def find_tasks(request: web.Request, stated: str) -> list[Task]:
    """Tasks by any id from a response: one task, all choices of one answer, or all tasks of a
    correlation id. For their own key or an admin key. Raises ``NotFound``."""
    key, orchestrator = request[CONTEXT].key, request.app[ORCHESTRATOR]
    prefix = next((each for each in ID_PREFIXES.values() if stated.startswith(each)), "")
    task_id = stated.removeprefix(prefix)

    def mine(tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if key.is_admin or task.job.key == key.fingerprint]

    kept: list[Task] = []
    with suppress(NotFound):
        kept.append(orchestrator.store.get(task_id))
    live: list[Task] = []
    if not kept or kept[0].job.api in ID_PREFIXES:  # other tasks have no other choices
        live = [task for task in orchestrator.live() if task not in kept]
    found = mine([*kept, *(task for task in live if task_id in (task.id, task.leader_id))])
    found = found or mine(
        task for task in live if stated in (task.correlation_id, task.job.request_id)
    )
    durable = orchestrator.stages.durable
    if not found and not kept and durable is not None and not orchestrator.sharing.fault:
        looked = await _look(orchestrator, durable, task_id)
        found = [] if looked is None else mine([looked[1]])
    if not found:
        raise no_such("task", stated)
    return found


def find_in_rooms(request: web.Request, name: str) -> list[tuple[Extension, AnyWork]]:
    """Live work of optional rooms by id or correlation id, for its own key or an admin key."""
    key = request[CONTEXT].key
    return [
        (room, work)
        for room in request.app[ORCHESTRATOR].rooms
        for work in room.live()
        if name in (work.id, work.correlation_id)
        and (key.is_admin or work.job.key == key.fingerprint)
    ]


def status_of(work: AnyWork) -> str:
    """The status of work, with the native API's names."""
    return max(Stage.QUEUED, work.stage).name.lower()


def is_kept(task: Task) -> bool:
    """Whether clients can fetch and follow a task's text by its id."""
    return task.job.keep or task.ending is not None


async def submitted_before(
    orchestrator: Orchestrator, job: Job, name: str, digest: bytes
) -> Task | None:
    """The durable task that the same key submitted with that name to any process; None if there is
    none. Raises ``KeyReused``, and the disk error of a task that is being written."""
    durable = orchestrator.stages.durable
    if durable is None:
        return None
    task = await durable.submission(job.key, name)
    if task is not None:
        if task.job.body_digest != digest:
            raise KeyReused.by_header()
        return task
    if durable.fault and not job.durable:  # a broken disk must not delay other work
        return None
    try:
        looked = await _look(orchestrator, durable, (job.key, name))
    except JournalUnavailable:
        if job.durable:
            raise
        return None
    if looked is None:
        return None
    row, task = looked
    if row.digest != digest:
        raise KeyReused.by_header()
    return task


async def _look(
    orchestrator: Orchestrator, durable: DurableTasks, question: Question
) -> tuple[TaskRow, Task] | None:
    """The task that the journal finds, or None. Raises ``NotFound`` if the task was forgotten."""
    for _ in range(2):
        found = await durable.find(question)
        if found is None:
            return None
        row = found.row
        if row.ended_unix is not None:
            return row, ended_task(row, found.result, orchestrator.clock)
        task = durable.ending(row.id)
        if task is not None:
            return row, task
        with suppress(NotFound):
            return row, orchestrator.store.get(row.id)
        # The task's end was written, and the task forgotten, after the row was read: read again.
    raise no_such("task", row.id)


class Elsewhere:
    """Other processes that answer for this one. This default has none; a room can replace it."""

    keeps_bodies = False
    """Whether requests may be forwarded, so that their bodies are kept until they are answered."""

    async def close(self) -> None:
        """Close all connections."""

    async def answer(self, request: web.Request, error: TidegateError) -> web.StreamResponse | None:
        """The answer of the owner of the id that ``error`` reports as unknown; None if there is no
        owner. Raises ``NoCapacity``, and ``NotReady`` before a takeover or without an answer."""
        return None


ELSEWHERE = web.AppKey("elsewhere", Elsewhere)


async def cancel(request: web.Request) -> web.Response:
    """Cancel work by an id. 202 if it was running, had ended or was already cancelled (WP-2)."""
    name = request.match_info["task_id"]
    found = find_in_rooms(request, name)
    for room, work in found:
        room.cancel(work)
    try:
        tasks = await cancel_tasks(request, name)
    except NotFound:
        if not found:
            raise
        tasks = []
    stopped = [(task.id, status_of(task), task.correlation_id) for task in tasks]
    stopped += [(work.id, "ended", work.correlation_id) for _, work in found]
    task_id, status, correlation_id = stopped[0]
    answer = {"task_id": task_id, "status": status, "correlation_id": correlation_id}
    ids = list(dict.fromkeys(each[0] for each in stopped))
    return json_response(answer | {"task_ids": ids}, status=202)


async def cancel_tasks(request: web.Request, name: str) -> Sequence[Task]:
    """Cancel the tasks with the id ``name``, for their key or an admin key. Raises ``NotFound``."""
    tasks = await find_tasks(request, name)
    for task in tasks:
        request.app[ORCHESTRATOR].cancel(task)
    for task in tasks:
        await recorded(task)
    return tasks


async def recorded(task: Task) -> None:
    """Wait until a durable task's outcome is on disk; a client may see it only then. Raises
    ``Draining`` if the next process continues the task."""
    if task.entry is not None and task.ending is not None:
        written = asyncio.Event()
        if not task.entry.is_left:
            task.entry.when_recorded(written.set)
            await written.wait()
        if task.entry.is_left:
            raise Draining("the task continues in another process; send this again in a moment")
