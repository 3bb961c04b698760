"""``GET /v2/tasks/{task_id}/explanation``: why a request missed, and what would have met it."""

from aiohttp import web

from orchestrator.api.http.answer_ids import task_id_of
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.finding import find_task
from orchestrator.api.http.responses import json_response
from orchestrator.errors import InvalidRequest, NotFound
from orchestrator.recording.explainer import Explainer
from orchestrator.recording.facts import RecordedRequest
from orchestrator.recording.findings import Alone, Findings, Tried
from orchestrator.recording.wording import change_of, reason_of, timeline, verdict_of
from orchestrator.tasks.task import Task


async def explanation(request: web.Request) -> web.Response:
    """Explain a request that has ended; one that missed is replayed, which takes some seconds."""
    explainer = request.app[ORCHESTRATOR].stages.explainer
    if explainer is None:
        raise NotFound(
            "nothing is recorded of requests here: the service's operator has set "
            "TIDEGATE_TELEMETRY__RECORDED_REQUESTS to 0"
        )
    asked = _recorded(request, explainer)
    if asked is None:
        raise _unrecorded(await find_task(request), explainer)
    found = await explainer.explain(asked) if asked.is_miss else None
    return json_response(_described(asked) | _replayed(found))


def routes() -> list[web.RouteDef]:
    return [web.get("/v2/tasks/{task_id}/explanation", explanation)]


def _recorded(request: web.Request, explainer: Explainer) -> RecordedRequest | None:
    """The recorded request that a path names: of several choices, the first that missed. For its
    own key or an admin's."""
    key, stated = request[CONTEXT].key, request.match_info["task_id"]
    found = [
        one
        for one in explainer.recorder.find(stated, task_id_of(stated))
        if key.is_admin or one.key == key.fingerprint
    ]
    return next((one for one in found if one.is_miss), found[0] if found else None)


def _unrecorded(task: Task, explainer: Explainer) -> NotFound | InvalidRequest:
    """The error for a task that is known, and of which nothing is recorded."""
    if task.ending is None:
        return InvalidRequest(
            "it has not ended: what would have met it can be said once it has", field="task_id"
        )
    return NotFound(
        f"it ended too long ago to be explained: the latest {explainer.recorder.most} requests are "
        "recorded (TIDEGATE_TELEMETRY__RECORDED_REQUESTS), and refusals for other reasons than "
        "time or room are not"
    )


def _described(asked: RecordedRequest) -> dict[str, object]:
    queue_ms, route_ms, prefill_ms, decode_ms = (round(ms, 1) for ms in asked.spent_ms)
    return {
        "task_id": asked.id,
        "model": asked.model,
        "outcome": asked.outcome,
        "code": asked.code or None,
        "missed_part": asked.missed_part,
        "stage": asked.blamed,
        "reason": reason_of(asked),
        "given_ms": round(1000 * (asked.deadline_at - asked.arrived), 1),
        "budget": {
            "queue_ms": queue_ms,
            "route_ms": route_ms,
            "prefill_ms": prefill_ms,
            "decode_ms": decode_ms,
        },
        "chance": None if asked.chance is None else round(asked.chance, 3),
        "prompt_tokens": asked.prompt_tokens,
        "completion_tokens": asked.tokens,
        "timeline": [event._asdict() for event in timeline(asked)],
    }


def _replayed(found: Findings | None) -> dict[str, object]:
    """The replay's part; for what did not miss there is none."""
    if found is None:
        lists: dict[str, object] = {"would_have_met": [], "would_not": [], "not_tried": []}
        return {"verdict": None, **lists, "replay": None}
    return {
        "verdict": verdict_of(found),
        "would_have_met": [_change(tried) for tried in found.tried if tried.met],
        "would_not": [_change(tried) for tried in found.tried if not tried.met],
        "not_tried": [change.value for change in found.not_tried],
        "replay": {
            "requests": found.requests,
            "cut": found.is_cut,
            "compared": found.compared,
            "agreed": found.agreed,
            "agreement": round(found.agreed / found.compared, 3) if found.compared else None,
            "reproduced": found.is_reproduced,
            "answer_tokens": found.answer_tokens,
            "answer_tokens_known": found.is_length_known,
            "took_ms": round(found.took_ms, 1),
        },
    }


def _change(tried: Tried) -> dict[str, object]:
    told: dict[str, object] = {"change": tried.change.value, "text": change_of(tried)}
    if tried.change is Alone.LATER_DEADLINE:
        told["by_ms"] = round(tried.by_ms)
    return told
