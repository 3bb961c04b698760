"""Errors as Anthropic spells them (https://docs.claude.com/en/api/errors)."""

from orchestrator.api.http.context import Dialect
from orchestrator.errors import InvalidRequest, RateLimited, TidegateError, Unavailable
from protocol import Code

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ThreadUnsupported(InvalidRequest):
    """The conversation goes on in a thread that was never kept. Claude Code then sends all of it,
    and no threads for the rest of its session."""


def status_of(error: TidegateError) -> int:
    """HTTP status of an error: the one of every dialect, except that 529 stands for whatever
    another time or place would serve."""
    if isinstance(error, Unavailable) and not isinstance(error, RateLimited):
        return OVERLOADED
    return error.status


def error_body(error: TidegateError, request_id: str) -> dict[str, object]:
    """An error as Anthropic's JSON object, with our ``code`` and the figures that belong to it
    added."""
    status = status_of(error)
    other = "invalid_request_error" if status < 499 else "api_error"
    message = f"{_overflow(error)}{error.message}"
    details: dict[str, object] = dict(error.details)
    if isinstance(error, ThreadUnsupported):
        details["details"] = {"error_code": "thread_unsupported_request"}
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(status, other),
            "message": message,
            "code": error.code.value,
            **details,
        },
        "request_id": request_id,
    }


def _overflow(error: TidegateError) -> str:
    """Anthropic's own prefix for a prompt that does not fit. Agents look for these words and
    figures, and shorten the conversation by them."""
    if error.code is not Code.CONTEXT_OVERFLOW or error.field not in ("prompt", "messages"):
        return ""
    told, figures = error.details, ""
    if "prompt_tokens" in told:
        figures = f"{told['prompt_tokens']} tokens > {told['context_tokens']} maximum; "
    return f"prompt is too long: {figures}"


ANTHROPIC = Dialect(
    "/v1/messages", error_body, status_of, request_id_header="request-id", is_tolerant=True
)
