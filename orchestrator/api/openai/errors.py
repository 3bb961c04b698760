"""Errors as OpenAI spells them (https://platform.openai.com/docs/guides/error-codes)."""

from orchestrator.api.http.context import Dialect
from orchestrator.errors import TidegateError
from protocol import Code

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CODES = {Code.CONTEXT_OVERFLOW: "context_length_exceeded"}
"""OpenAI's own names of errors that clients go by."""


def error_body(error: TidegateError) -> dict[str, object]:
    other = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.status, other),
            "param": error.field,
            "code": _CODES.get(error.code, error.code.value),
            **error.details,
        }
    }


OPENAI = Dialect(
    "/v1",
    lambda error, request_id: error_body(error),
    time_header="openai-processing-ms",
    tells_queue=True,
    is_tolerant=True,
    aliases=frozenset({"/tokenize", "/detokenize", "/tokenizer_info", "/version", "/load"}),
)
