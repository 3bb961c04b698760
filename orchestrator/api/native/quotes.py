"""``POST /v2/quote``: the chance of meeting each deadline, before a request is sent."""

from typing import Annotated

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.fields import read_job_of
from orchestrator.api.http.responses import json_response
from orchestrator.api.native.types import TaskRequest, given
from orchestrator.errors import InvalidRequest
from orchestrator.prediction.promises import BROKEN
from orchestrator.prediction.quotes import ChanceBy
from orchestrator.tasks.job import Api, Job, Prompt

MAX_HOLD_MS = 30_000.0


class QuoteRequest(TaskRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v2/tasks``, which may have the prompt's length instead of a prompt."""

    prompt_tokens: Annotated[int, msgspec.Meta(gt=0, lt=2**31)] | None = None
    accept: float | None = None
    """Chance of the deadline to reserve; None reserves nothing."""
    hold_ms: Annotated[float, msgspec.Meta(gt=0, le=MAX_HOLD_MS)] = 5000.0
    """How long to hold a reservation for the request that uses it, in ms."""


async def quote(request: web.Request) -> web.Response:
    """Quote a request. Reserve a deadline for it if the body has ``accept``."""
    orchestrator = request.app[ORCHESTRATOR]
    job, prompt, body = await read_body(request, QuoteRequest, lambda body: _read(request, body))
    task, found = await orchestrator.questions.quote(job, prompt, body.prompt_tokens or 0)
    unix_ms = 1000 * orchestrator.clock.unix()

    def described(point: ChanceBy) -> dict[str, object]:
        return {
            "chance": round(point.chance, 3),
            "within_ms": round(point.within_ms, 1),
            "deadline_unix_ms": round(unix_ms + point.within_ms),
        }

    answer: dict[str, object] = {
        "model": task.served_name,
        "prompt_tokens": task.prompt_tokens,
        "max_tokens": task.sampling.max_tokens,
        "curve": [described(point) for point in found.curve],
        "stated": None if found.stated is None else described(found.stated),
        "earliest": [described(point) for point in found.earliest],
        "reservation": None,
    }
    if body.accept is not None:
        offer = next(one for one in found.earliest if one.chance == body.accept)
        promises, hold_s = orchestrator.stages.prediction.promises, body.hold_ms / 1000
        held = promises.reserve(task, offer.within_ms, offer.chance, hold_s)
        answer["reservation"] = {
            "chance": held.chance,
            "within_ms": round(held.unix_ms - unix_ms, 1),
            "deadline_unix_ms": held.unix_ms,
            "headers": {"X-Deadline": str(held.unix_ms)},
            "held_until_unix_ms": round(unix_ms + body.hold_ms),
        }
    return json_response(answer)


def routes() -> list[web.RouteDef]:
    return [web.post("/v2/quote", quote)]


def _read(request: web.Request, body: QuoteRequest) -> tuple[Job, Prompt | None, QuoteRequest]:
    if body.accept is not None and body.accept not in BROKEN:
        chances = ", ".join(map(str, BROKEN))
        raise must("accept", f"be one of {chances}: the chance of keeping the reserved deadline")
    job = read_job_of(request, body, Api.NATIVE, keep=False)
    if request.app[ORCHESTRATOR].room_of(job) is not None:
        raise InvalidRequest(
            "a conversation of /v2/sessions cannot be quoted by its id: send its whole length as "
            "prompt_tokens, without session_id",
            field="session_id",
        )
    prompt = body.prompt_of() if body.prompt_tokens is None else None
    if body.prompt_tokens is not None and given(body):
        raise InvalidRequest(
            "expected either a prompt or its length as prompt_tokens, got both; send one of them",
            field="prompt_tokens",
        )
    return job, prompt, body
