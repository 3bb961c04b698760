"""``/v2/tasks``: submit, query, follow and cancel tasks."""

import hashlib
import re
from dataclasses import replace

import msgspec
from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.fields import read_job
from orchestrator.api.http.finding import (
    cancel,
    find_task,
    is_kept,
    recorded,
    status_of,
    submitted_before,
)
from orchestrator.api.http.responses import (
    deadline_headers,
    json_response,
    task_fields,
    task_headers,
)
from orchestrator.api.native.events import (
    TaskEvents,
    ended,
    error_object,
    last_number,
    read_last_event_id,
    usage,
)
from orchestrator.api.native.listing import listing
from orchestrator.api.native.types import TaskRequest
from orchestrator.errors import NotFound
from orchestrator.tasks.job import Api, Job, Prompt
from orchestrator.tasks.submissions import SubmissionKey, Submissions
from orchestrator.tasks.task import Task

SUBMISSIONS = web.AppKey("submissions", Submissions[Task])
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


async def submit(request: web.Request) -> web.Response:
    """Submit a task. Answers 202 with the URLs to follow it."""
    orchestrator = request.app[ORCHESTRATOR]
    name = read_idempotency_key(request)
    job, prompt, digest = await read_body(
        request, TaskRequest, lambda body: _read(request, body, name)
    )
    is_repeated = False
    of_room = orchestrator.room_of(job)
    submit_job = orchestrator.submit if of_room is None else of_room
    if name is None:
        task = await submit_job(job, prompt)
    else:
        key = SubmissionKey(job.key, name)
        task, is_repeated = await request.app[SUBMISSIONS].once(
            key,
            digest,
            lambda: submit_job(job, prompt),
            before=lambda: submitted_before(orchestrator, job, name, digest),
            wait_s=min(job.deadline.at, job.parts.cut_at) - orchestrator.clock.now(),
        )
    answer = {
        "task_id": task.id,
        "status": status_of(task),
        "queue_position": orchestrator.questions.queue_position(task),
        "predicted_start_ms": round(orchestrator.questions.predicted_start_ms(task), 1),
        "events_url": f"/v2/tasks/{task.id}/events",
        "correlation_id": task.correlation_id,
    }
    durable = orchestrator.stages.durable
    if durable is not None and task.job.durable:
        answer["durable"] = True
        if durable.window_ms:
            answer["loss_window_ms"] = durable.window_ms
    if of_room is not None:
        answer["session_id"] = job.session_id
    headers = task_headers(task, orchestrator.clock.now())
    if is_repeated:
        headers["Idempotent-Replayed"] = "true"
    return json_response(answer | task_fields(task), status=202, headers=headers)


async def status(request: web.Request) -> web.Response:
    """Show the current state of a task."""
    orchestrator = request.app[ORCHESTRATOR]
    task = await find_task(request)
    await recorded(task)
    ending = task.ending
    answer: dict[str, object] = {
        "task_id": task.id,
        "status": status_of(task),
        "correlation_id": task.correlation_id,
        "model": task.served_name,
        **_text(task),
        "usage": usage(task),
        **task_fields(task),
        "deadline_unix_ms": task.deadline.unix_ms,
        "deadline_source": task.deadline.source or None,
        "events_url": f"/v2/tasks/{task.id}/events",
    }
    if task.calls_left:
        answer["calls_to_come"] = round(task.calls_left, 2)
    if ending is None:
        answer["queue_position"] = orchestrator.questions.queue_position(task)
        answer["predicted_start_ms"] = round(orchestrator.questions.predicted_start_ms(task), 1)
    else:
        answer |= ended(task, ending)
        if task.is_text_removed:
            answer["text_removed"] = True
        if ending.error is not None:
            answer["error"] = error_object(ending.error)
    return json_response(answer, headers=task_headers(task, orchestrator.clock.now()))


async def events(request: web.Request) -> web.StreamResponse:
    """Stream a task's events from the beginning, or after ``Last-Event-ID`` (OR-1)."""
    orchestrator = request.app[ORCHESTRATOR]
    task = await find_task(request)
    if not is_kept(task):
        raise NotFound(
            "this request's events go only to its own client; to follow a request here, send it to "
            "/v2/tasks or with on_disconnect: continue"
        )
    after = read_last_event_id(request.headers.get("Last-Event-ID"))
    last = last_number(task)
    if last is not None:
        await recorded(task)
    if last is not None and after >= last:
        return web.Response(status=204)  # tells a browser's EventSource not to reconnect
    stream = EventStream(request, deadline_headers(task.deadline), request.app[CONFIG].keepalive_s)
    follower = TaskEvents(stream, after, orchestrator.clock)
    replay = follower.replay(task, orchestrator.questions.queue_position(task))

    def tell() -> None:
        orchestrator.mark_reading(task, not all(other.is_behind for other in _followers(task)))

    stream.on_behind = tell
    orchestrator.mark_reading(task, True)
    try:
        return await stream.run(replay)
    finally:
        task.unlisten(follower)
        if _followers(task):
            tell()
        elif task.ending is None:
            orchestrator.disconnected(task, too_slow=stream.too_slow)


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v2/tasks", submit),
        web.get("/v2/tasks", listing),
        web.get("/v2/tasks/{task_id}", status),
        # The stream writes directly to the socket, but a response to HEAD must have no body.
        web.get("/v2/tasks/{task_id}/events", events, allow_head=False),
        web.post("/v2/tasks/{task_id}/cancel", cancel),
        web.delete("/v2/tasks/{task_id}", cancel),
    ]


def read_idempotency_key(request: web.Request) -> str | None:
    """The client's idempotency key; None if there is none. Raises ``InvalidRequest``."""
    name = request.headers.get("Idempotency-Key")
    if name is not None and not _IDEMPOTENCY_KEY.fullmatch(name):
        raise must("Idempotency-Key", "be 1 to 255 printable ASCII characters without spaces")
    return name


def _read(request: web.Request, body: TaskRequest, name: str | None) -> tuple[Job, Prompt, bytes]:
    """The job and prompt of a body. If the submission has a ``name``, also the body's digest."""
    job, prompt = read_job(request, body, Api.NATIVE, keep=True)
    digest = b"" if name is None else hashlib.sha256(msgspec.json.encode(body)).digest()
    if body.durable:
        job = replace(
            job,
            durable=True,
            idempotent=body.idempotent,
            idempotency_key=name or "",
            body_digest=digest,
        )
    return job, prompt, digest


def _text(task: Task) -> dict[str, object]:
    """The task's text so far, if it is kept. Text only for its own client is not."""
    if not is_kept(task):
        return {}
    return {"text": task.record().text() + ("" if task.ending is None else task.ending.tail)}


def _followers(task: Task) -> list[TaskEvents]:
    return [listener for listener in task.listeners if isinstance(listener, TaskEvents)]
