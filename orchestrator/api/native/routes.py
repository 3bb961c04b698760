"""``/v2/tasks``: submit, ask, follow, cancel."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import (
    CONTEXT,
    ORCHESTRATOR,
    deadline_headers,
    fit_headers,
    json_response,
    missed_headers,
)
from orchestrator.api.http.deadlines import read_deadline, read_parts
from orchestrator.api.http.event_stream import EventStream, StreamLimits
from orchestrator.api.http.fields import PlacementBody, read_wishes
from orchestrator.api.native.events import TaskEvents, last_number, read_last_event_id
from orchestrator.errors import InvalidRequest
from orchestrator.service import Orchestrator
from orchestrator.tasks.store import no_such_task
from orchestrator.tasks.task import Api, Job, Message, OnDisconnect, Priority, Prompt, Stage, Task
from worker.protocol import (
    MAX_LOGIT_BIASES,
    InvalidSampling,
    OnDeadline,
    Sampling,
    read_logit_bias,
    stated_of,
    unstated_of,
)


class TaskMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn of a chat. A body may have so many that the collector would be the dearest part."""

    role: str
    content: str


class TaskRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a submission: exactly one of ``prompt``, ``messages``, ``prompt_token_ids``."""

    model: str = ""
    prompt: str | None = None
    messages: list[TaskMessage] | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: msgspec.Raw = msgspec.Raw(b"null")
    deadline_ms: float | None = None
    first_token_ms: float | None = None
    token_gap_ms: float | None = None
    on_deadline: OnDeadline = OnDeadline.ERROR
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    priority: Priority = Priority.INTERACTIVE
    tenant: str | None = None
    session_id: str | None = None
    placement: PlacementBody | None = None


_decoder = msgspec.json.Decoder(TaskRequest)


async def submit(request: web.Request) -> web.Response:
    """Take a task on: 202 with where to follow it."""
    orchestrator = request.app[ORCHESTRATOR]
    job, prompt = await read_body(request, _decoder, lambda body: _asked(request, body))
    task = await orchestrator.submit(job, prompt)
    answer = {
        "task_id": task.id,
        "status": _status(task),
        "queue_position": orchestrator.queue_position(task),
        "predicted_start_ms": round(orchestrator.predicted_start_ms(task), 1),
        "events_url": f"/v2/tasks/{task.id}/events",
        "correlation_id": task.correlation_id,
    }
    headers = {**deadline_headers(job.deadline), **fit_headers(task)}
    return json_response(answer | task.fitted(), status=202, headers=headers)


async def status(request: web.Request) -> web.Response:
    """A task as it stands."""
    orchestrator = request.app[ORCHESTRATOR]
    task = _task_of(request)
    ending = task.ending
    answer: dict[str, object] = {
        "task_id": task.id,
        "status": _status(task),
        "correlation_id": task.correlation_id,
        "model": task.model,
        "text": task.record().text() + (ending.tail if ending is not None else ""),
        "usage": task.usage(),
        **task.fitted(),
        "deadline_unix_ms": task.deadline.unix_ms,
        "events_url": f"/v2/tasks/{task.id}/events",
    }
    if ending is None:
        answer["queue_position"] = orchestrator.queue_position(task)
        answer["predicted_start_ms"] = round(orchestrator.predicted_start_ms(task), 1)
        return json_response(answer)
    answer["outcome"] = ending.outcome
    answer["finish_reason"] = ending.finish_reason
    answer["budget"] = ending.budget.native()
    answer |= ending.missed()
    if ending.error is not None:
        answer["error"] = ending.error.native()
    budget = {"X-Deadline-Budget": ending.budget.header()}
    return json_response(answer, headers={**budget, **missed_headers(ending)})


async def events(request: web.Request) -> web.StreamResponse:
    """Follow a task from its beginning, or from after ``Last-Event-ID`` (OR-1)."""
    orchestrator = request.app[ORCHESTRATOR]
    task = _task_of(request)
    after = read_last_event_id(request.headers.get("Last-Event-ID"))
    last = last_number(task)
    if last is not None and after >= last:
        return web.Response(status=204)  # tells a browser's EventSource not to come again
    stream = EventStream(request, deadline_headers(task.deadline), stream_limits(orchestrator))
    metrics_s = orchestrator.settings.metrics_event_ms / 1000
    follower = TaskEvents(stream, after, orchestrator.clock, metrics_every_s=metrics_s)
    past = follower.past(task, orchestrator.queue_position(task))

    def tell() -> None:
        orchestrator.reads(task, not all(other.is_behind for other in _followers(task)))

    stream.on_behind = tell
    orchestrator.reads(task, True)
    try:
        return await stream.run(past)
    finally:
        task.unlisten(follower)
        if _followers(task):
            tell()
        elif task.ending is None:
            orchestrator.disconnected(task, too_slow=stream.too_slow)


async def cancel(request: web.Request) -> web.Response:
    """Stop a task; 202 whether it ran, had ended or was cancelled before (WP-2)."""
    orchestrator = request.app[ORCHESTRATOR]
    task = _task_of(request)
    orchestrator.cancel(task)
    return json_response(
        {"task_id": task.id, "status": _status(task), "correlation_id": task.correlation_id},
        status=202,
    )


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v2/tasks", submit),
        web.get("/v2/tasks/{task_id}", status),
        web.delete("/v2/tasks/{task_id}", cancel),
        # Its bytes go straight to the socket, where an answer to HEAD must have none.
        web.get("/v2/tasks/{task_id}/events", events, allow_head=False),
        web.post("/v2/tasks/{task_id}/cancel", cancel),
    ]


# ── translation, shared with the other dialects where it is the same ─────────────────────────────


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


_bias_decoder = msgspec.json.Decoder(dict[str, float] | None)
_MOST_BIAS_BYTES = 64 * 1024
"""As many as there may be take less; many more take long to decode."""


def logit_biases(stated: msgspec.Raw) -> tuple[tuple[int, float], ...]:
    if len(memoryview(stated)) > _MOST_BIAS_BYTES:
        raise InvalidRequest(
            f"logit_bias must have at most {MAX_LOGIT_BIASES} tokens", field="logit_bias"
        )
    try:
        return read_logit_bias(_bias_decoder.decode(stated))
    except msgspec.ValidationError as error:
        wrong = str(error).partition(" - at ")[0]
        raise InvalidRequest(f"logit_bias: {wrong}", field="logit_bias") from None
    except InvalidSampling as error:
        raise InvalidRequest(str(error), field=error.field) from None


def stream_limits(orchestrator: Orchestrator) -> StreamLimits:
    return StreamLimits(
        backlog_bytes=orchestrator.settings.slow_client_buffer_bytes,
        timeout_s=orchestrator.settings.slow_client_timeout_s,
        kernel_bytes=orchestrator.settings.slow_client_kernel_bytes,
        keepalive_s=orchestrator.settings.sse_keepalive_s or None,
        behind_s=orchestrator.settings.slow_client_pause_s,
    )


def _asked(request: web.Request, body: TaskRequest) -> tuple[Job, Prompt]:
    orchestrator, context = request.app[ORCHESTRATOR], request[CONTEXT]
    deadline = read_deadline(
        request.headers, body.deadline_ms, context.arrival, orchestrator.deadlines
    )
    wishes = read_wishes(body, context.key)
    job = Job(
        api=Api.NATIVE,
        model=body.model,
        sampling=Sampling(
            max_tokens=body.max_tokens or 0,
            min_tokens=body.min_tokens,
            seed=body.seed,
            stop=stop_strings(body.stop),
            ignore_eos=body.ignore_eos,
            logprobs=body.logprobs,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=logit_biases(body.logit_bias),
            **stated_of(body),
        ),
        unstated=unstated_of(body),
        max_tokens=body.max_tokens,
        deadline=deadline,
        correlation_id=context.correlation_id,
        arrived=context.arrival.mono,
        parts=read_parts(request.headers, body, context.arrival),
        on_deadline=body.on_deadline,
        on_disconnect=body.on_disconnect,
        keep=True,
        key=context.key.fingerprint,
        priority=wishes.priority,
        tenant=wishes.tenant,
        session_id=wishes.session_id,
        placement=wishes.placement,
    )
    return job, _prompt(body)


def _prompt(body: TaskRequest) -> Prompt:
    given = [
        name
        for name in ("prompt", "messages", "prompt_token_ids")
        if getattr(body, name) is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(
            "expected exactly one of prompt, messages and prompt_token_ids, got "
            + (" and ".join(given) or "none"),
            field=given[1] if given else "prompt",
        )
    if body.prompt is not None:
        return body.prompt
    if body.messages is not None:
        if not body.messages:
            raise InvalidRequest("messages is empty; it needs at least one", field="messages")
        return tuple(Message(m.role, m.content) for m in body.messages)
    return tuple(body.prompt_token_ids or ())


def _task_of(request: web.Request) -> Task:
    """The task that a path names, for its own key or an admin's. Raises ``NotFound``."""
    task_id, key = request.match_info["task_id"], request[CONTEXT].key
    task = request.app[ORCHESTRATOR].store.get(task_id)
    if task.job.key != key.fingerprint and not key.is_admin:
        raise no_such_task(task_id)
    return task


def _status(task: Task) -> str:
    if task.stage is Stage.ENDED:
        return "ended"
    return "running" if task.stage is Stage.RUNNING else "queued"


def _followers(task: Task) -> list[TaskEvents]:
    return [listener for listener in task.listeners if isinstance(listener, TaskEvents)]
