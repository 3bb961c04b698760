"""``/v2/slots``: submit a recipe; query, follow and cancel a clip; download rendered files.

A clip's events are numbered (OR-1): 0 is ``queued``, then ``stage`` events follow, and one terminal
event, ``result`` or ``error``. A follower first gets the stored events, then new ones.
"""

import hashlib
from collections.abc import Iterator
from typing import Literal

import msgspec
from aiohttp import web

from clips.dispatch.fleet import ClipFleet
from clips.dispatch.service import Clips
from clips.dispatch.task import MODEL, OUTPUTS, ClipJob, ClipTask, StageProgress
from clips.files import send_file
from clips.plan.recipe import RecipeError, read_recipe
from orchestrator.api.config import CONFIG
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR, trace_of
from orchestrator.api.http.deadlines import read_deadline
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.responses import deadline_headers, json_response
from orchestrator.api.native.events import NumberedEvents, error_object, read_last_event_id
from orchestrator.api.native.listing import listed, standing
from orchestrator.api.native.routes import read_idempotency_key
from orchestrator.errors import InvalidRequest, ModelNotFound, NotFound
from orchestrator.retention import no_such
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import OnDisconnect
from orchestrator.tasks.submissions import SubmissionKey, Submissions
from protocol import excerpt


class ClipBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a new clip. The worker's rules apply to ``recipe`` (docs/slot.md)."""

    recipe: msgspec.Raw
    model: str = "slot"
    deadline_ms: float | None = None
    on_deadline: Literal["error", "degrade"] = "error"
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    outputs: tuple[Literal["mp4", "wav", "png"], ...] = ("mp4",)


CLIPS = web.AppKey("clips", Clips)
CLIP_SUBMISSIONS = web.AppKey("clip_submissions", Submissions[ClipTask])


async def submit(request: web.Request) -> web.Response:
    """Submit a clip: 202 with the URLs to follow it."""
    orchestrator = request.app[ORCHESTRATOR]
    clips, name = request.app[CLIPS], read_idempotency_key(request)
    job, digest = await read_body(
        request,
        ClipBody,
        lambda body: (
            _job(request, body),
            b"" if name is None else hashlib.sha256(msgspec.json.encode(body)).digest(),
        ),
    )
    is_repeated = False
    if name is None:
        clip = clips.submit(job)
    else:

        async def make() -> ClipTask:
            return clips.submit(job)

        clip, is_repeated = await request.app[CLIP_SUBMISSIONS].once(
            SubmissionKey(job.key, name),
            digest,
            make,
            wait_s=job.deadline.at - orchestrator.clock.now(),
        )
    headers = deadline_headers(clip.deadline)
    if is_repeated:
        headers["Idempotent-Replayed"] = "true"
    return json_response(_standing(request, clip), status=202, headers=headers)


async def status(request: web.Request) -> web.Response:
    """Show a clip's current state."""
    clip = _clip_of(request)
    answer = _standing(request, clip)
    answer["deadline_unix_ms"] = clip.deadline.unix_ms
    answer["stages"] = clip.percents
    if clip.ending is not None:
        answer |= ended(clip, clip.ending)
        if clip.ending.error is not None:
            answer["error"] = error_object(clip.ending.error)
    return json_response(answer, headers=deadline_headers(clip.deadline))


async def listing(request: web.Request) -> web.Response:
    """List the caller's clips, or all clips for an admin; newest first, ``limit`` of one
    ``status``."""
    found = request.app[CLIPS].store.newest_first()
    return await listed(request, "slots", found, described)


async def events(request: web.Request) -> web.StreamResponse:
    """Follow a clip from its beginning, or from after ``Last-Event-ID`` (OR-1)."""
    clips, clip = request.app[CLIPS], _clip_of(request)
    after = read_last_event_id(request.headers.get("Last-Event-ID"))
    last = clip.last_number
    if last is not None and after >= last:
        return web.Response(status=204)  # stops a browser's EventSource from reconnecting
    # A client that claims a later event id would never get the last event.
    after = min(after, len(clip.events))
    stream = EventStream(request, deadline_headers(clip.deadline), request.app[CONFIG].keepalive_s)
    follower = ClipEvents(stream, after)
    try:
        return await stream.run(follower.replay(clip, clips))
    finally:
        clip.unlisten(follower)
        is_followed = any(isinstance(other, ClipEvents) for other in clip.listeners)
        if clip.ending is None and not is_followed:
            clips.disconnected(clip, too_slow=stream.too_slow)


async def cancel(request: web.Request) -> web.Response:
    """Cancel a clip; 202 even if it had ended or was already cancelled (WP-2)."""
    clip = _clip_of(request)
    request.app[CLIPS].cancel(clip)
    return json_response(
        {
            "slot_id": clip.id,
            "status": clip.stage.name.lower(),
            "correlation_id": clip.job.correlation_id,
        },
        status=202,
    )


async def output(request: web.Request) -> web.StreamResponse:
    """Fetch a rendered file, or a range of it."""
    clip, file = _clip_of(request), request.match_info["name"]
    for name, kind in OUTPUTS.items():
        if kind.file == file and name in clip.files:
            return await send_file(request, clip.files[name], *kind, etag=f"{clip.id}-{name}")
    there = ", ".join(OUTPUTS[name].file for name in clip.files) or "none"
    until = "" if clip.ending is not None else "; the slot has not ended yet"
    raise NotFound(f"this slot has no file {excerpt(file)}; available: {there}{until}")


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v2/slots", submit),
        web.get("/v2/slots", listing),
        web.get("/v2/slots/{slot_id}", status),
        web.delete("/v2/slots/{slot_id}", cancel),
        # It writes directly to the socket, but an answer to HEAD must have no body.
        web.get("/v2/slots/{slot_id}/events", events, allow_head=False),
        web.post("/v2/slots/{slot_id}/cancel", cancel),
        web.get("/v2/slots/{slot_id}/outputs/{name}", output),
    ]


def _job(request: web.Request, body: ClipBody) -> ClipJob:
    """The job for a request body. Raises ``InvalidRequest``, ``ModelNotFound``."""
    context = request[CONTEXT]
    policy = request.app[ORCHESTRATOR].deadlines
    deadline = read_deadline(
        request.headers,
        body.deadline_ms,
        context.arrival,
        policy,
        is_awaited=False,
        ignored=context.ignored_headers,
    )
    context.deadline = deadline
    if body.model != MODEL:
        raise ModelNotFound(
            f"the model {excerpt(body.model)} renders no slots; available: {MODEL}", field="model"
        )
    if not body.outputs:
        raise InvalidRequest(
            f"outputs is empty; it needs at least one of {', '.join(OUTPUTS)}", field="outputs"
        )
    recipe_json = bytes(body.recipe)
    try:
        recipe = read_recipe(recipe_json)
    except RecipeError as error:
        field = f"recipe.{error.field}" if error.field else "recipe"
        raise InvalidRequest(str(error), field=field) from None
    return ClipJob(
        recipe=recipe,
        recipe_json=recipe_json,
        deadline=deadline,
        correlation_id=context.correlation_id,
        arrived=context.arrival.mono,
        outputs=tuple(dict.fromkeys(body.outputs)),
        degrade=body.on_deadline == "degrade",
        on_disconnect=body.on_disconnect,
        key=context.key.fingerprint,
        trace=trace_of(request),
    )


def _standing(request: web.Request, clip: ClipTask) -> dict[str, object]:
    """The common fields of answers to a submission and to a query."""
    clips = request.app[CLIPS]
    answer: dict[str, object] = {
        "slot_id": clip.id,
        "status": clip.stage.name.lower(),
        "model": MODEL,
        "queue_position": clips.waiting.position(clip),
        "predicted_ms": clips.predicted_ms(clip),
        "events_url": f"/v2/slots/{clip.id}/events",
        "outputs": outputs_of(clip),
        "correlation_id": clip.job.correlation_id,
    }
    expected = clips.expected(clip)
    if expected is not None:
        answer["predicted_given_up"] = clips.given_up(clip, expected)
    return answer


def _clip_of(request: web.Request) -> ClipTask:
    """The clip in a path, for its owner's key or an admin's. Raises ``NotFound``."""
    clip_id, key = request.match_info["slot_id"], request[CONTEXT].key
    clip = request.app[CLIPS].store.get(clip_id)
    if clip.job.key != key.fingerprint and not key.is_admin:
        raise no_such("slot", clip_id)
    return clip


PIECE_EVENTS = 64
"""Number of events in one chunk of a replay."""


class ClipEvents(NumberedEvents):
    """Follows one clip for one client, after the event ``after``."""

    def replay(self, clip: ClipTask, clips: Clips) -> Iterator[bytes]:
        """Yield past events in chunks, then follow the clip."""
        queued = {
            "slot_id": clip.id,
            "queue_position": clips.waiting.position(clip),
            "predicted_ms": clips.predicted_ms(clip),
        }
        yield self._event(0, "queued", queued)
        sent = max(0, self._after)
        while found := clip.events[sent : sent + PIECE_EVENTS]:  # it continues in between
            sent += len(found)
            yield b"".join(map(self._spelled, found))
        if clip.ending is not None:
            self.ended(clip)
        else:
            clip.listen(self)

    # as a listener

    def progressed(self, event: StageProgress) -> None:
        self._stream.send(self._spelled(event))

    def ended(self, clip: ClipTask) -> None:
        ending, number = clip.ending, clip.last_number
        assert ending is not None and number is not None
        kind = "result" if ending.error is None else "error"
        words: dict[str, object] = {} if ending.error is None else error_object(ending.error)
        data = words | {"slot_id": clip.id} | ended(clip, ending)
        data["outputs"] = outputs_of(clip)
        data["correlation_id"] = clip.job.correlation_id
        self._stream.finish(self._event(number, kind, data))

    # inside

    def _spelled(self, event: StageProgress) -> bytes:
        data = {"stage": event.stage, "percent": event.percent}
        return self._event(event.number, "stage", data)


def ended(clip: ClipTask, ending: Ending) -> dict[str, object]:
    """The fields for a clip that has ended, except its error: the worker's facts, and the
    outcome."""
    return {**clip.facts, "outcome": ending.outcome, "instance": clip.instance or None}


def outputs_of(clip: ClipTask) -> dict[str, str]:
    """Download paths of a clip's files, by output name."""
    return {name: f"/v2/slots/{clip.id}/outputs/{OUTPUTS[name].file}" for name in clip.files}


def described(clip: ClipTask, now: float) -> dict[str, object]:
    """A clip as one line of a list, without its recipe."""
    return {"slot_id": clip.id, **standing(clip, now), "outputs": outputs_of(clip)}


def describe_instance(fleet: ClipFleet, address: str, *, briefly: bool) -> dict[str, object] | None:
    """An instance's slot model; None if it has none. ``briefly``: only the watched facts. The full
    version adds ``told``, the model's own report, if any."""
    instance = fleet.instances.get(address)
    if instance is None or not instance.heard_at:
        return None
    ability, told = instance.ability, instance.state
    described: dict[str, object] = {
        "state": instance.health.value,
        "ready": fleet.is_ready(instance),
        "reason": instance.reason,
        "slots_total": ability.slots,
        "slots_free": instance.free,
        "running": len(instance.attempts),
        "max_size": ability.max_size,
        "max_seconds": ability.max_seconds,
        "buffer_s": ability.buffer_s,
    }
    if not briefly:
        return described | {"told": told}
    stages = {} if told is None else told.stages
    return described | {
        "waiting": 0 if told is None else told.waiting,
        "p95_ms": {name: stage.p95_ms for name, stage in stages.items()},
        "memory_used_bytes": None if told is None else told.memory_used_bytes,
        "abort_to_free_p99_ms": None if told is None else told.abort_to_free_p99_ms,
    }
