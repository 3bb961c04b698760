"""Tasks that clients name: those of this process, and what the journal has of earlier ones."""

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.errors import JournalUnavailable, KeyReused, NotFound
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Job
from orchestrator.tasks.journal.reader import Found
from orchestrator.tasks.journal.records import ended_task
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
        found = await durable.find(task_id)
        if found is None:
            raise
        task = _task_of(found, orchestrator)
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
        found = await durable.find_submission(job.key, name)
    except JournalUnavailable:
        if job.durable:
            raise
        return None
    if found is None:
        return None
    if found.row.digest != digest:
        raise KeyReused.by_header()
    return _task_of(found, orchestrator)


def _task_of(found: Found, orchestrator: Orchestrator) -> Task:
    """Raises ``NotFound`` for one that has just been forgotten."""
    if found.row.ended_unix is None:
        durable = orchestrator.stages.durable
        ending = None if durable is None else durable.ending(found.row.id)
        return ending or orchestrator.store.get(found.row.id)
    return ended_task(found.row, found.result, orchestrator.clock)
