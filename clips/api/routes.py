"""``/v2/slots``: submit a recipe; query, follow and cancel a slot; fetch what was rendered."""

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec
from aiohttp import web

from clips.api.events import ClipEvents, described, ended, outputs_of
from clips.api.files import send_file
from clips.api.types import ClipBody
from clips.dispatch.job import MODEL, OUTPUTS, ClipJob
from clips.dispatch.service import Clips
from clips.dispatch.task import ClipTask
from clips.plan.errors import RecipeError
from clips.plan.recipe import read_recipe
from orchestrator.api.config import CONFIG
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR, trace_of
from orchestrator.api.http.deadlines import read_deadline
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.responses import deadline_headers, json_response
from orchestrator.api.native.events import error_object, read_last_event_id
from orchestrator.api.native.listing import listed
from orchestrator.api.native.routes import read_idempotency_key
from orchestrator.api.openapi.operation import EVENTS, PLAIN, Operation
from orchestrator.errors import InvalidRequest, ModelNotFound, NotFound
from orchestrator.retention import no_such
from orchestrator.tasks.submissions import SubmissionKey, Submissions
from protocol import excerpt

CLIPS = web.AppKey("clips", Clips)
CLIP_SUBMISSIONS = web.AppKey("clip_submissions", Submissions[ClipTask])

_reader = Reader(ClipBody)


async def submit(request: web.Request) -> web.Response:
    """Submit a slot: 202 with where to follow it."""
    orchestrator = request.app[ORCHESTRATOR]
    clips, name = request.app[CLIPS], read_idempotency_key(request)
    job, digest = await read_body(
        request,
        _reader,
        lambda body: (
            _job(request, body),
            b"" if name is None else hashlib.sha256(msgspec.json.encode(body)).digest(),
        ),
    )
    is_repeated = False
    if name is None:
        slot = clips.submit(job)
    else:

        async def make() -> ClipTask:
            return clips.submit(job)

        slot, is_repeated = await request.app[CLIP_SUBMISSIONS].once(
            SubmissionKey(job.key, name),
            digest,
            make,
            wait_s=job.deadline.at - orchestrator.clock.now(),
        )
    headers = deadline_headers(slot.deadline)
    if is_repeated:
        headers["Idempotent-Replayed"] = "true"
    return json_response(_standing(request, slot), status=202, headers=headers)


async def status(request: web.Request) -> web.Response:
    """Show a slot's current state."""
    slot = _slot_of(request)
    answer = _standing(request, slot)
    answer["deadline_unix_ms"] = slot.deadline.unix_ms
    answer["stages"] = slot.percents
    if slot.ending is not None:
        answer |= ended(slot, slot.ending)
        if slot.ending.error is not None:
            answer["error"] = error_object(slot.ending.error)
    return json_response(answer, headers=deadline_headers(slot.deadline))


async def listing(request: web.Request) -> web.Response:
    """List the caller's slots, or everybody's for an admin; newest first, ``limit`` of one
    ``status``."""
    found = request.app[CLIPS].store.newest_first()
    return await listed(request, "slots", found, described)


async def events(request: web.Request) -> web.StreamResponse:
    """Follow a slot from its beginning, or from after ``Last-Event-ID`` (OR-1)."""
    clips, slot = request.app[CLIPS], _slot_of(request)
    after = read_last_event_id(request.headers.get("Last-Event-ID"))
    last = slot.last_number
    if last is not None and after >= last:
        return web.Response(status=204)  # tells a browser's EventSource not to come again
    # A client that claims to have more than there is would never hear of the end.
    after = min(after, slot.newest_number)
    stream = EventStream(request, deadline_headers(slot.deadline), request.app[CONFIG].keepalive_s)
    follower = ClipEvents(stream, after)
    replay = follower.replay(slot, clips.queue_position(slot), clips.predicted_ms(slot))
    try:
        return await stream.run(replay)
    finally:
        slot.unlisten(follower)
        is_followed = any(isinstance(other, ClipEvents) for other in slot.listeners)
        if slot.ending is None and not is_followed:
            clips.disconnected(slot, too_slow=stream.too_slow)


async def cancel(request: web.Request) -> web.Response:
    """Cancel a slot; 202 whether it ran, had ended or was cancelled before (WP-2)."""
    slot = _slot_of(request)
    request.app[CLIPS].cancel(slot)
    return json_response(
        {
            "slot_id": slot.id,
            "status": slot.stage.name.lower(),
            "correlation_id": slot.job.correlation_id,
        },
        status=202,
    )


async def output(request: web.Request) -> web.StreamResponse:
    """Fetch a rendered file, or a range of it."""
    slot, file = _slot_of(request), request.match_info["name"]
    for name, kind in OUTPUTS.items():
        if kind.file == file and name in slot.files:
            return await send_file(request, slot.files[name], *kind, etag=f"{slot.id}-{name}")
    there = ", ".join(OUTPUTS[name].file for name in slot.files) or "none"
    until = "" if slot.ending is not None else "; the slot has not ended yet"
    raise NotFound(f"this slot has no file {excerpt(file)}; available: {there}{until}")


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v2/slots", submit),
        web.get("/v2/slots", listing),
        web.get("/v2/slots/{slot_id}", status),
        web.delete("/v2/slots/{slot_id}", cancel),
        # Its bytes go straight to the socket, where an answer to HEAD must have none.
        web.get("/v2/slots/{slot_id}/events", events, allow_head=False),
        web.post("/v2/slots/{slot_id}/cancel", cancel),
        web.get("/v2/slots/{slot_id}/outputs/{name}", output),
    ]


OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /v2/slots": Operation(ClipBody, statuses=(202,)),
    "GET /v2/slots": Operation(parameters=("status", "limit")),
    "GET /v2/slots/{slot_id}": PLAIN,
    "DELETE /v2/slots/{slot_id}": Operation(statuses=(202,)),
    "GET /v2/slots/{slot_id}/events": Operation(gives=(EVENTS,)),
    "POST /v2/slots/{slot_id}/cancel": Operation(statuses=(202,)),
    "GET /v2/slots/{slot_id}/outputs/{name}": Operation(
        gives=("video/mp4", "audio/wav", "image/png"), statuses=(200, 206, 304)
    ),
}


def _job(request: web.Request, body: ClipBody) -> ClipJob:
    """The job that a body asks for. Raises ``InvalidRequest``, ``ModelNotFound``."""
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
        preview=body.preview,
        on_disconnect=body.on_disconnect,
        key=context.key.fingerprint,
        trace=trace_of(request),
    )


def _standing(request: web.Request, slot: ClipTask) -> dict[str, object]:
    """The fields that answers to a submission and to a query have in common."""
    clips = request.app[CLIPS]
    answer: dict[str, object] = {
        "slot_id": slot.id,
        "status": slot.stage.name.lower(),
        "model": MODEL,
        "queue_position": clips.queue_position(slot),
        "predicted_ms": None,
        "events_url": f"/v2/slots/{slot.id}/events",
        "outputs": outputs_of(slot),
        "correlation_id": slot.job.correlation_id,
    }
    expected = clips.expected(slot)
    if expected is not None:
        answer["predicted_ms"] = round(clips.predicted_ms(slot) or 0.0, 1)
        answer["predicted_given_up"] = clips.given_up(slot, expected)
    return answer


def _slot_of(request: web.Request) -> ClipTask:
    """The slot that a path names, for its own key or an admin's. Raises ``NotFound``."""
    slot_id, key = request.match_info["slot_id"], request[CONTEXT].key
    slot = request.app[CLIPS].store.get(slot_id)
    if slot.job.key != key.fingerprint and not key.is_admin:
        raise no_such("slot", slot_id)
    return slot
