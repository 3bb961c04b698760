"""Errors in Triton's form: one string, worded ``code: message`` as on its own ports."""

from orchestrator.api.http.context import Dialect
from orchestrator.errors import TidegateError


def error_body(error: TidegateError, request_id: str = "") -> dict[str, str]:
    return {"error": f"{error.code}: {error.message}"}


KSERVE = (Dialect("/v2/models", error_body, is_tolerant=True), Dialect("/v2/health", error_body))
