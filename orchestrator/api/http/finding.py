"""Tasks by the ids that clients name: those of this process, and earlier ones from the journal."""

import functools
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from aiohttp import web

from orchestrator.api.http.answer_ids import ID_PREFIXES, task_id_of
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.errors import JournalUnavailable, KeyReused, NotFound
from orchestrator.extension import Extension
from orchestrator.retention import no_such
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Job
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.records import TaskRow, ended_task
from orchestrator.tasks.journal.store import Found
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork, Stage


async def find_task(request: web.Request) -> Task:
    """The task that a path names, for its own key or an admin's. Raises ``NotFound``."""
    return (await find_tasks(request, request.match_info["task_id"]))[0]


async def find_tasks(request: web.Request, stated: str) -> list[Task]:
    """Tasks by any id that was shown: one task, all choices of one answer, or whatever runs under a
    correlation id. For their own key or an admin's. Raises ``NotFound``."""
    key = request[CONTEXT].key
    orchestrator, task_id = request.app[ORCHESTRATOR], task_id_of(stated)

    def mine(tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if key.is_admin or task.job.key == key.fingerprint]

    try:
        kept = [orchestrator.store.get(task_id)]
    except NotFound:
        kept = []
    if kept and kept[0].job.api not in ID_PREFIXES:  # it stands alone
        live: list[Task] = []
    else:
        live = [task for task in orchestrator.live() if task not in kept]
    found = mine([*kept, *(task for task in live if task_id in (task.id, task.leader_id))])
    found = found or mine(
        task for task in live if stated in (task.correlation_id, task.job.request_id)
    )
    durable = orchestrator.stages.durable
    if not found and not kept and durable is not None:
        looked = await _look(orchestrator, durable, lambda: durable.find(task_id))
        found = [] if looked is None else mine([looked[1]])
    if not found:
        raise no_such("task", stated)
    return found


def find_in_rooms(request: web.Request, name: str) -> list[tuple[Extension, AnyWork]]:
    """Live work of optional rooms by id or correlation id, for its own key or an admin's."""
    key = request[CONTEXT].key
    return [
        (room, work)
        for room in request.app[ORCHESTRATOR].rooms
        for work in room.live()
        if name in (work.id, work.correlation_id)
        and (key.is_admin or work.job.key == key.fingerprint)
    ]


def status_of(work: AnyWork) -> str:
    """How far work is, in the native API's words."""
    return max(Stage.QUEUED, work.stage).name.lower()


def is_kept(task: Task) -> bool:
    """Whether a task's text can be asked for, and followed, by whoever knows its id."""
    return task.job.keep or task.ending is not None


async def submitted_before(
    orchestrator: Orchestrator, job: Job, name: str, digest: bytes
) -> Task | None:
    """The durable task that the same key has submitted under that name, to this process or an
    earlier one; None if there is none. Raises ``KeyReused``, and the error that keeps a task being
    written from reaching the disk."""
    durable = orchestrator.stages.durable
    if durable is None:
        return None
    task = await durable.submission(job.key, name)
    if task is not None:
        if task.job.body_digest != digest:
            raise KeyReused.by_header()
        return task
    if durable.fault and not job.durable:  # other work does not wait for a broken disk
        return None
    try:
        find = functools.partial(durable.find_submission, job.key, name)
        looked = await _look(orchestrator, durable, find)
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
    orchestrator: Orchestrator,
    durable: DurableTasks,
    find: Callable[[], Awaitable[Found | None]],
) -> tuple[TaskRow, Task] | None:
    """The task that ``find`` finds; None if there is none. Raises ``NotFound`` for one that was
    forgotten."""
    for _ in range(2):
        found = await find()
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
        # Its end was written, and it was forgotten, after the row was read: read it again.
    raise no_such("task", row.id)
