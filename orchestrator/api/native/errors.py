"""Errors of the native API."""

from orchestrator.api.http.context import Dialect
from orchestrator.errors import TidegateError


def error_object(error: TidegateError) -> dict[str, object]:
    """An error as a JSON object, for an answer's body, a task's ``error``, and an ``error``
    event."""
    body: dict[str, object] = {
        "code": error.code.value,
        "message": error.message,
        "retryable": error.retryable,
    }
    if error.field is not None:
        body["field"] = error.field
    return body | error.details


NATIVE = Dialect("/v2", lambda error, request_id: {"error": error_object(error)})
