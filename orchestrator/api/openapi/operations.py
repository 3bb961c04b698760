"""The requests and answers of each route, for ``/openapi.json``. A missing route fails a test.

Keys are method and path as the router has them. Errors are not here: they follow from the path's
dialect.
"""

from collections.abc import Mapping

from orchestrator.api.anthropic.types import CountTokensRequest, MessagesRequest
from orchestrator.api.kserve.types import GenerateRequest, InferRequest
from orchestrator.api.native.quotes import QuoteRequest
from orchestrator.api.native.types import TaskRequest
from orchestrator.api.openai.embeddings import EmbeddingRequest
from orchestrator.api.openai.tokens import DetokenizeRequest, TokenizeRequest
from orchestrator.api.openai.types import ChatRequest, CompletionRequest
from orchestrator.api.openapi.operation import EVENTS, JSON, PLAIN, TEXT, Operation
from orchestrator.api.operator.types import (
    DrainRequest,
    RegisterRequest,
    ReloadRequest,
    SwapRequest,
)

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
    "GET /v1/models": PLAIN,
    "GET /v1/models/{model}": PLAIN,
    **{f"POST {at}/tokenize": Operation(TokenizeRequest) for at in ("", "/v1")},
    **{f"POST {at}/detokenize": Operation(DetokenizeRequest) for at in ("", "/v1")},
    **{f"GET {at}/tokenizer_info": Operation(parameters=("model",)) for at in ("", "/v1")},
    "POST /v1/messages": Operation(MessagesRequest, _BOTH),
    "POST /v1/messages/count_tokens": Operation(CountTokensRequest),
    "POST /v2/tasks": Operation(TaskRequest, statuses=(202,)),
    "POST /v2/quote": Operation(QuoteRequest),
    "GET /v2/tasks": Operation(parameters=("status", "limit")),
    "GET /v2/tasks/{task_id}": PLAIN,
    "GET /v2/tasks/{task_id}/events": Operation(gives=(EVENTS,)),
    **{f"POST {at}/generate": Operation(GenerateRequest) for at in _MODEL},
    **{f"POST {at}/generate_stream": Operation(GenerateRequest, (EVENTS,)) for at in _MODEL},
    **{f"POST {at}/infer": Operation(InferRequest) for at in _MODEL},
    **{f"GET {at}": PLAIN for at in _MODEL},
    **{f"GET {at}/ready": PLAIN for at in _MODEL},
    "GET /v2": PLAIN,
    "GET /v2/health/live": PLAIN,
    "GET /v2/health/ready": _PROBE,
    "GET /v2/capabilities": PLAIN,
    "GET /v2/instances": PLAIN,
    "GET /v2/instances/{address}": PLAIN,
    "POST /v2/instances": Operation(RegisterRequest, statuses=(200, 201)),
    "DELETE /v2/instances/{address}": PLAIN,
    "POST /v2/instances/{address}/drain": Operation(
        DrainRequest, statuses=(202,), body_is_optional=True
    ),
    "POST /v2/instances/{address}/undrain": PLAIN,
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
    "GET /admin/drain": PLAIN,
    "POST /admin/drain": Operation(DrainRequest, statuses=(202,), body_is_optional=True),
    "POST /admin/undrain": PLAIN,
    "POST /admin/reload": PLAIN,
    "GET /admin/recording": PLAIN,
    "GET /v2/overview": PLAIN,
    "GET /v2/overview/events": Operation(gives=(EVENTS,)),
    "GET /health": _PROBE,
    "GET /health/live": _PROBE,
    "GET /health/ready": _PROBE,
    "GET /health/startup": _PROBE,
    "GET /version": PLAIN,
    "GET /ping": _PROBE,
    "POST /ping": _PROBE,
    "GET /load": PLAIN,
    "GET /v1/health/live": _PROBE,
    "GET /v1/health/ready": _PROBE,
    "GET /v1/metadata": PLAIN,
    "GET /v1/version": PLAIN,
    "GET /metrics": Operation(gives=(TEXT,)),
    "GET /metrics/vllm": Operation(gives=(TEXT,)),
    "GET /openapi.json": PLAIN,
}
