"""The requests and answers of each route, for ``/openapi.json``. A missing route fails a test.

Keys are method and path as the router has them. Errors are not here: they follow from the path's
dialect.
"""

from collections.abc import Mapping
from typing import NamedTuple

from clips.api.slot_types import SlotRequest
from orchestrator.api.anthropic.types import CountTokensRequest, MessagesRequest
from orchestrator.api.kserve.types import GenerateRequest, InferRequest
from orchestrator.api.native.quotes import QuoteRequest
from orchestrator.api.native.types import SessionRequest, TaskRequest
from orchestrator.api.openai.batches import BatchRequest
from orchestrator.api.openai.embeddings import EmbeddingRequest
from orchestrator.api.openai.responses.types import ResponsesRequest
from orchestrator.api.openai.tokens import DetokenizeRequest, TokenizeRequest
from orchestrator.api.openai.types import ChatRequest, CompletionRequest
from orchestrator.api.operator.types import (
    DrainRequest,
    RegisterRequest,
    ReloadRequest,
    SwapRequest,
)

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
HTML = "text/html"


class Operation(NamedTuple):
    """One route. ``gives`` are the media types of its ``statuses``, those of a successful
    answer."""

    body: type | None = None
    gives: tuple[str, ...] = (JSON,)
    statuses: tuple[int, ...] = (200,)
    parameters: tuple[str, ...] = ()
    """Names of query parameters."""
    body_is_optional: bool = False
    takes: Mapping[str, object] | None = None
    """The schema of a body of ``multipart/form-data``; None for another type of body."""


FORM: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
    "required": ["file", "purpose"],
}
_PLAIN = Operation()
_BOTH = (JSON, EVENTS)
_PROBE = Operation(statuses=(200, 503))

_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation(ChatRequest, _BOTH),
    "POST /v1/completions": Operation(CompletionRequest, _BOTH),
    "POST /v1/embeddings": Operation(EmbeddingRequest),
    **{
        f"POST {path}/{{task_id}}/cancel": Operation(statuses=(202,))
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v2/tasks")
    },
    "DELETE /v2/tasks/{task_id}": Operation(statuses=(202,)),
    "POST /v1/files": Operation(takes=FORM),
    "GET /v1/files": Operation(parameters=("purpose", "limit", "order", "after")),
    "GET /v1/files/{file_id}": _PLAIN,
    "DELETE /v1/files/{file_id}": _PLAIN,
    "GET /v1/files/{file_id}/content": Operation(gives=("application/jsonl",)),
    "POST /v1/batches": Operation(BatchRequest),
    "GET /v1/batches": Operation(parameters=("limit", "after")),
    "GET /v1/batches/{batch_id}": _PLAIN,
    "POST /v1/batches/{batch_id}/cancel": _PLAIN,
    "GET /v1/models": _PLAIN,
    "GET /v1/models/{model}": _PLAIN,
    **{f"POST {at}/tokenize": Operation(TokenizeRequest) for at in ("", "/v1")},
    **{f"POST {at}/detokenize": Operation(DetokenizeRequest) for at in ("", "/v1")},
    **{f"GET {at}/tokenizer_info": Operation(parameters=("model",)) for at in ("", "/v1")},
    "POST /v1/responses": Operation(ResponsesRequest, _BOTH),
    "POST /v1/responses/input_tokens": Operation(ResponsesRequest),
    "GET /v1/responses/{response_id}": _PLAIN,
    "DELETE /v1/responses/{response_id}": _PLAIN,
    "POST /v1/responses/{response_id}/cancel": _PLAIN,
    "POST /v1/messages": Operation(MessagesRequest, _BOTH),
    "POST /v1/messages/count_tokens": Operation(CountTokensRequest),
    "POST /v2/tasks": Operation(TaskRequest, statuses=(202,)),
    "POST /v2/quote": Operation(QuoteRequest),
    "GET /v2/tasks": Operation(parameters=("status", "limit")),
    "GET /v2/tasks/{task_id}": _PLAIN,
    "GET /v2/tasks/{task_id}/events": Operation(gives=(EVENTS,)),
    "GET /v2/tasks/{task_id}/explanation": _PLAIN,
    "POST /v2/slots": Operation(SlotRequest, statuses=(202,)),
    "GET /v2/slots": Operation(parameters=("status", "limit")),
    "GET /v2/slots/{slot_id}": _PLAIN,
    "DELETE /v2/slots/{slot_id}": Operation(statuses=(202,)),
    "GET /v2/slots/{slot_id}/events": Operation(gives=(EVENTS,)),
    "POST /v2/slots/{slot_id}/cancel": Operation(statuses=(202,)),
    "GET /v2/slots/{slot_id}/outputs/{name}": Operation(
        gives=("video/mp4", "audio/wav", "image/png"), statuses=(200, 206, 304)
    ),
    "POST /v2/sessions": Operation(SessionRequest, statuses=(200, 201), body_is_optional=True),
    "GET /v2/sessions": _PLAIN,
    "GET /v2/sessions/{session_id}": _PLAIN,
    "DELETE /v2/sessions/{session_id}": _PLAIN,
    **{f"POST {at}/generate": Operation(GenerateRequest) for at in _MODEL},
    **{f"POST {at}/generate_stream": Operation(GenerateRequest, (EVENTS,)) for at in _MODEL},
    **{f"POST {at}/infer": Operation(InferRequest) for at in _MODEL},
    **{f"GET {at}": _PLAIN for at in _MODEL},
    **{f"GET {at}/ready": _PLAIN for at in _MODEL},
    "GET /v2": _PLAIN,
    "GET /v2/health/live": _PLAIN,
    "GET /v2/health/ready": _PROBE,
    "GET /v2/capabilities": _PLAIN,
    "GET /v2/instances": _PLAIN,
    "GET /v2/instances/{address}": _PLAIN,
    "POST /v2/instances": Operation(RegisterRequest, statuses=(200, 201)),
    "DELETE /v2/instances/{address}": _PLAIN,
    "POST /v2/instances/{address}/drain": Operation(
        DrainRequest, statuses=(202,), body_is_optional=True
    ),
    "POST /v2/instances/{address}/undrain": _PLAIN,
    **{
        f"GET /v2/catalog/{kind}": Operation(statuses=(200, 304), parameters=("limit", "cursor"))
        for kind in ("models", "engines")
    },
    **{
        f"GET /v2/catalog/{kind}/{{id}}{part}": Operation(statuses=(200, 304))
        for kind in ("models", "engines")
        for part in ("", "/state")
    },
    **{
        f"POST /v2/catalog/{kind}/{{id}}/verify": Operation(statuses=(202,))
        for kind in ("models", "engines")
    },
    "POST /v2/instances/{address}/swap": Operation(SwapRequest, statuses=(200, 202)),
    "POST /v2/instances/{address}/reload": Operation(
        ReloadRequest, statuses=(200, 202), body_is_optional=True
    ),
    "GET /admin/drain": _PLAIN,
    "POST /admin/drain": Operation(DrainRequest, statuses=(202,), body_is_optional=True),
    "POST /admin/undrain": _PLAIN,
    "POST /admin/reload": _PLAIN,
    "GET /v2/overview": _PLAIN,
    "GET /v2/overview/events": Operation(gives=(EVENTS,)),
    "GET /health": _PROBE,
    "GET /health/live": _PROBE,
    "GET /health/ready": _PROBE,
    "GET /health/startup": _PROBE,
    "GET /version": _PLAIN,
    "GET /ping": _PROBE,
    "POST /ping": _PROBE,
    "GET /load": _PLAIN,
    "GET /v1/health/live": _PROBE,
    "GET /v1/health/ready": _PROBE,
    "GET /v1/metadata": _PLAIN,
    "GET /v1/version": _PLAIN,
    "GET /metrics": Operation(gives=(TEXT,)),
    "GET /metrics/vllm": Operation(gives=(TEXT,)),
    "GET /openapi.json": _PLAIN,
    "GET /": Operation(gives=(HTML,)),
    "GET /page/{name}": Operation(gives=("*/*",), statuses=(200, 304)),
}
