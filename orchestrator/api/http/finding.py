"""Tasks by the ids that clients name: found, and cancelled, in this process, in the journal of an
earlier one, or in another process.

An orchestrator that shares a state asks the owner of an unknown id, and the other processes at its
port (``orchestrator.state.forwarding``).
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.errors import (
    Draining,
    JournalUnavailable,
    KeyReused,
    NotFound,
    NotReady,
    TidegateError,
)
from orchestrator.extension import Extension
from orchestrator.retention import no_such
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.records import TaskRow, ended_task
from orchestrator.tasks.journal.store import Found
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork, Stage

ID_PREFIXES = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETIONS: "cmpl-",
    Api.RESPONSES: "resp_",
    Api.MESSAGES: "msg_",
}


def answer_id(task: Task) -> str:
    """Id of the client's answer; a request with several choices has one for all of them."""
    return ID_PREFIXES.get(task.job.api, "") + task.leader_id


def task_id_of(name: str) -> str:
    """The task's own id, from itself or from its answer's id."""
    for prefix in ID_PREFIXES.values():
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


async def find_task(request: web.Request) -> Task:
    """The task that a path names, for its own key or an admin's. Raises ``NotFound``."""
    return (await find_tasks(request, request.match_info["task_id"]))[0]


async def find_tasks(request: web.Request, stated: str) -> list[Task]:
    """Tasks by any id that was shown: one task, all choices of one answer, or everything under a
    correlation id. For their own key or an admin's. Raises ``NotFound``."""
    key = request[CONTEXT].key
    orchestrator, task_id = request.app[ORCHESTRATOR], task_id_of(stated)

    def mine(tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if key.is_admin or task.job.key == key.fingerprint]

    try:
        kept = [orchestrator.store.get(task_id)]
    except NotFound:
        kept = []
    if kept and kept[0].job.api not in ID_PREFIXES:  # it is alone
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
    """Whether a task's text can be asked for, and followed, by its id."""
    return task.job.keep or task.ending is not None


async def submitted_before(
    orchestrator: Orchestrator, job: Job, name: str, digest: bytes
) -> Task | None:
    """The durable task that the same key submitted under that name, to any process; else None.
    Raises ``KeyReused``, and the error that keeps a task being written from reaching the disk."""
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
    orchestrator: Orchestrator, durable: DurableTasks, find: Callable[[], Awaitable[Found | None]]
) -> tuple[TaskRow, Task] | None:
    """The task that ``find`` finds, or None. Raises ``NotFound`` for one that was forgotten."""
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


class SiblingAnswer(NamedTuple):
    status: int
    body: bytes


class Elsewhere:
    """Other processes that answer for this one: none, unless a room replaces it."""

    keeps_bodies = False
    """Whether a request may be sent on, so that its body is kept until it is answered."""

    async def close(self) -> None:
        """Close all connections."""

    async def answer(self, request: web.Request, error: TidegateError) -> web.StreamResponse | None:
        """The answer of the owner of what ``error`` says is unknown here; None if none has it.
        Raises ``NotReady`` if it is about to be taken over, or not answered; ``NoCapacity``."""
        return None

    async def of_one(self, request: web.Request) -> web.StreamResponse | None:
        """The answer of the process that answers such a request for all of a port; None where this
        one is to answer. Raises ``NotReady`` where that one breaks off."""
        return None

    async def of_siblings(self, request: web.Request) -> list[SiblingAnswer]:
        """What the other processes at this port answer. Raises ``NotReady`` if one does not."""
        return []


ELSEWHERE = web.AppKey("elsewhere", Elsewhere)


async def told_by_siblings(request: web.Request) -> list[Any]:
    """What the other processes at this port answer to the same request, from JSON, without those
    that have no such thing. Raises ``NotReady`` where one does not answer, or refuses."""
    answers = await request.app[ELSEWHERE].of_siblings(request)
    if any(answer.status >= 400 and answer.status != 404 for answer in answers):
        raise NotReady("not all processes have done it; send it again in a moment")
    return [msgspec.json.decode(answer.body) for answer in answers if answer.status < 400]


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
    """Cancel the tasks that go by ``name``, for their key or an admin's. Raises ``NotFound``."""
    tasks = await find_tasks(request, name)
    for task in tasks:
        request.app[ORCHESTRATOR].cancel(task)
    for task in tasks:
        await recorded(task)
    return tasks


async def recorded(task: Task) -> None:
    """Wait until a durable task's outcome is on disk, before a client gets it. Raises ``Draining``
    if the task is left to the next process."""
    if task.entry is not None and task.ending is not None:
        written = asyncio.Event()
        if not task.entry.is_left:
            task.entry.when_recorded(written.set)
            await written.wait()
        if task.entry.is_left:
            raise Draining("the task continues in another process; ask again in a moment")
