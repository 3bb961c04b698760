"""Tasks that clients name: those of this process, and what the journal has of earlier ones."""

import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.errors import JournalUnavailable, KeyReused, NotFound
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Job
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.reader import Found
from orchestrator.tasks.journal.records import TaskRow, ended_task
from orchestrator.tasks.store import no_such_task
from orchestrator.tasks.task import Task


async def find_task(request: web.Request) -> Task:
    """The task that a path names, for its own key or an admin's. Raises ``NotFound``."""
    task_id, key = request.match_info["task_id"], request[CONTEXT].key
    orchestrator = request.app[ORCHESTRATOR]
    durable = orchestrator.stages.durable
    try:
        task = orchestrator.store.get(task_id)
    except NotFound:
        if durable is None:
            raise
        looked = await _look(orchestrator, durable, lambda: durable.find(task_id))
        if looked is None:
            raise
        _, task = looked
    if task.job.key != key.fingerprint and not key.is_admin:
        raise no_such_task(task_id)
    return task


async def submitted_before(
    orchestrator: Orchestrator, job: Job, name: str, digest: bytes
) -> Task | None:
    """The durable task that the same key has submitted by that name, to this process or an earlier
    one; None where it has not. Raises ``KeyReused``, and what
    keeps one that is being written from the disk.
    """
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
    """What ``find`` finds; None for nothing. Raises ``NotFound`` for one that was forgotten."""
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
    raise no_such_task(row.id)
