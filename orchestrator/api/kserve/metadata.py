"""Metadata and readiness of the server and its models (KServe v2)."""

from collections.abc import Mapping

from aiohttp import web

from orchestrator.api.config import VERSION
from orchestrator.api.http.context import HEALTH, ORCHESTRATOR, served_name
from orchestrator.api.http.responses import json_response
from orchestrator.errors import NotFound
from orchestrator.prompts.encoder import PromptEncoder
from protocol import tensors as names

MODEL_VERSION = "1"

INPUTS = {
    names.TEXT_INPUT: "BYTES",
    names.STREAM: "BOOL",
    names.SAMPLING_PARAMETERS: "BYTES",
    names.EXCLUDE_INPUT_IN_OUTPUT: "BOOL",
    names.RETURN_FINISH_REASON: "BOOL",
    names.RETURN_CUMULATIVE_LOGPROB: "BOOL",
    names.RETURN_LOGPROBS: "BOOL",
    names.RETURN_NUM_INPUT_TOKENS: "BOOL",
    names.RETURN_NUM_OUTPUT_TOKENS: "BOOL",
}
OUTPUTS = {
    names.TEXT_OUTPUT: "BYTES",
    names.FINISH_REASON: "BYTES",
    names.CUMULATIVE_LOGPROB: "FP32",
    names.LOGPROBS: "BYTES",
    names.NUM_INPUT_TOKENS: "UINT32",
    names.NUM_OUTPUT_TOKENS: "UINT32",
}
"""Output tensors and their types, as in ``model_repository/llm/config.pbtxt``."""


def model_of(request: web.Request) -> PromptEncoder:
    """The model that a path names; Triton's own model name means the only one there is. Raises
    ``NotReady`` or ``ModelNotFound``, and ``NotFound`` for a version that does not exist."""
    orchestrator, match = request.app[ORCHESTRATOR], request.match_info
    if match.get("version", MODEL_VERSION) != MODEL_VERSION:
        raise NotFound(f"a model has one version, {MODEL_VERSION}")
    name = served_name(request, match["model"])
    is_alias = name == names.MODEL_NAME and name not in orchestrator.models.by_name()
    return orchestrator.models.resolve("" if is_alias else name)


async def server(request: web.Request) -> web.Response:
    """Show this server's name, version and extensions."""
    extensions = ["generate"]
    for room in request.app[ORCHESTRATOR].rooms:
        extensions += [name for name, is_there in room.capabilities().items() if is_there is True]
    return json_response({"name": "tidegate", "version": VERSION, "extensions": extensions})


async def live(request: web.Request) -> web.Response:
    """Check that the process answers."""
    return web.Response(status=request.app[HEALTH].live.status)


async def ready(request: web.Request) -> web.Response:
    """Check that the service takes work; 503 while work should go elsewhere."""
    return web.Response(status=request.app[HEALTH].ready.status)


async def model(request: web.Request) -> web.Response:
    """Show a model's tensors."""
    return json_response(
        {
            "name": model_of(request).name,
            "versions": [MODEL_VERSION],
            "platform": "python",
            "inputs": _described(INPUTS),
            "outputs": _described(OUTPUTS),
        }
    )


async def model_ready(request: web.Request) -> web.Response:
    """Check that an instance of the model takes work; 503 while none does."""
    card = model_of(request).card
    is_ready = any(
        instance.ready and instance.card is not None and instance.card.model == card.model
        for instance in request.app[ORCHESTRATOR].registry
    )
    return web.Response(status=200 if is_ready else 503)


def routes() -> list[web.RouteDef]:
    return [
        web.get("/v2", server),
        web.get("/v2/health/live", live),
        web.get("/v2/health/ready", ready),
        *(web.get(path, model) for path in paths()),
        *(web.get(path, model_ready) for path in paths("/ready")),
    ]


def paths(end: str = "") -> tuple[str, str]:
    return f"/v2/models/{{model}}{end}", f"/v2/models/{{model}}/versions/{{version}}{end}"


def _described(tensors: Mapping[str, str]) -> list[dict[str, object]]:
    return [{"name": n, "datatype": kind, "shape": [1]} for n, kind in tensors.items()]
