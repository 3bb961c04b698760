"""``/v2/slots``: submit a recipe; query, follow and cancel a slot; fetch what was rendered."""

import hashlib

import msgspec
from aiohttp import web

from clips.api.slot_events import SlotEvents, described, ended, outputs_of
from clips.api.slot_types import SlotRequest
from clips.dispatch.job import MODEL, OUTPUTS, SlotJob
from clips.dispatch.slot import Slot
from clips.plan.errors import RecipeError
from clips.plan.recipe import read_recipe
from orchestrator.api.config import CONFIG
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR, trace_of
from orchestrator.api.http.deadlines import read_deadline
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.files import send_file
from orchestrator.api.http.responses import deadline_headers, json_response
from orchestrator.api.native.errors import error_object
from orchestrator.api.native.events import read_last_event_id
from orchestrator.api.native.listing import listed
from orchestrator.api.native.routes import read_idempotency_key
from orchestrator.errors import InvalidRequest, ModelNotFound, NotFound
from orchestrator.retention import no_such
from orchestrator.tasks.submissions import SubmissionKey, Submissions
from protocol import excerpt

SLOT_SUBMISSIONS = web.AppKey("slot_submissions", Submissions[Slot])

_reader = Reader(SlotRequest)


async def submit(request: web.Request) -> web.Response:
    """Submit a slot: 202 with where to follow it."""
    orchestrator = request.app[ORCHESTRATOR]
    slots, name = orchestrator.slots, read_idempotency_key(request)
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
        slot = slots.submit(job)
    else:

        async def make() -> Slot:
            return slots.submit(job)

        slot, is_repeated = await request.app[SLOT_SUBMISSIONS].once(
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
    slots = request.app[ORCHESTRATOR].slots.store.newest_first()
    return await listed(request, "slots", slots, described)


async def events(request: web.Request) -> web.StreamResponse:
    """Follow a slot from its beginning, or from after ``Last-Event-ID`` (OR-1)."""
    slots, slot = request.app[ORCHESTRATOR].slots, _slot_of(request)
    after = read_last_event_id(request.headers.get("Last-Event-ID"))
    last = slot.last_number
    if last is not None and after >= last:
        return web.Response(status=204)  # tells a browser's EventSource not to come again
    # A client that claims to have more than there is would never hear of the end.
    after = min(after, slot.newest_number)
    stream = EventStream(request, deadline_headers(slot.deadline), request.app[CONFIG].keepalive_s)
    follower = SlotEvents(stream, after)
    replay = follower.replay(slot, slots.queue_position(slot), slots.predicted_ms(slot))
    try:
        return await stream.run(replay)
    finally:
        slot.unlisten(follower)
        is_followed = any(isinstance(other, SlotEvents) for other in slot.listeners)
        if slot.ending is None and not is_followed:
            slots.disconnected(slot, too_slow=stream.too_slow)


async def cancel(request: web.Request) -> web.Response:
    """Cancel a slot; 202 whether it ran, had ended or was cancelled before (WP-2)."""
    slot = _slot_of(request)
    request.app[ORCHESTRATOR].slots.cancel(slot)
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


def _job(request: web.Request, body: SlotRequest) -> SlotJob:
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
    return SlotJob(
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


def _standing(request: web.Request, slot: Slot) -> dict[str, object]:
    """The fields that answers to a submission and to a query have in common."""
    slots = request.app[ORCHESTRATOR].slots
    answer: dict[str, object] = {
        "slot_id": slot.id,
        "status": slot.stage.name.lower(),
        "model": MODEL,
        "queue_position": slots.queue_position(slot),
        "predicted_ms": None,
        "events_url": f"/v2/slots/{slot.id}/events",
        "outputs": outputs_of(slot),
        "correlation_id": slot.job.correlation_id,
    }
    expected = slots.expected(slot)
    if expected is not None:
        answer["predicted_ms"] = round(slots.predicted_ms(slot) or 0.0, 1)
        answer["predicted_given_up"] = slots.given_up(slot, expected)
    return answer


def _slot_of(request: web.Request) -> Slot:
    """The slot that a path names, for its own key or an admin's. Raises ``NotFound``."""
    slot_id, key = request.match_info["slot_id"], request[CONTEXT].key
    slot = request.app[ORCHESTRATOR].slots.store.get(slot_id)
    if slot.job.key != key.fingerprint and not key.is_admin:
        raise no_such("slot", slot_id)
    return slot
