"""Errors about one field of a request. Their messages start with its name."""

from orchestrator.errors import InvalidRequest


def wrong(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", field=field)


def must(field: str, what: str) -> InvalidRequest:
    """The error for a value that breaks a rule: the field must ``what``."""
    return InvalidRequest(f"{field} must {what}", field=field)


def missing(field: str, hint: str = "") -> InvalidRequest:
    """The error for a required field. ``hint`` says what to send."""
    return InvalidRequest(f"{field} is required{hint and f': {hint}'}", field=field)
