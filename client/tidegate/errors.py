"""The client's errors, as one class tree::

    TidegateError
    ├── ConnectFailed (ConnectionError)         no answer at the base URL
    ├── StreamLost (ConnectionError)            the event stream broke and stayed broken
    ├── ProtocolError (ValueError)              the answer is not what the API promises
    ├── ToolTimeout (TimeoutError)              a tool was not done within its time limit
    └── ApiError                                the server said no: code, status, retryable
        ├── InvalidRequest (ValueError)         the request cannot be served, now or later
        ├── AuthFailed (PermissionError)        token missing or wrong
        ├── NotFound (LookupError)              unknown task or model
        ├── DeadlineExceeded (TimeoutError)     too late, or certain to be
        ├── TaskCancelled                       the task was cancelled
        └── Unavailable                         no room or not ready: a retry can help

``ApiError`` itself is raised for codes that have no class of their own (a broken engine, say).
"""

from collections.abc import Mapping
from typing import Any


class TidegateError(Exception):
    """Base class of all errors that this client raises."""


class ConnectFailed(TidegateError, ConnectionError):
    """The connection to the orchestrator failed, or broke before the answer.

    ``is_sent``: the orchestrator may have received the request.
    """

    def __init__(self, message: str, *, is_sent: bool = False) -> None:
        super().__init__(message)
        self.is_sent = is_sent


class StreamLost(TidegateError, ConnectionError):
    """The event stream of ``task_id`` broke and no reconnect succeeded in time."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id


class ProtocolError(TidegateError, ValueError):
    """The server answered with something that the API does not promise."""


class ToolTimeout(TidegateError, TimeoutError):
    """A tool did not finish within its ``tool_deadline``; the run may have time left."""


class ApiError(TidegateError):
    """The server refused or failed a request.

    ``status`` is the HTTP status, None when the error arrived as a stream's terminal event.
    ``retry_after_s`` is the server's own hint. ``details`` holds the rest of the error.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
        task_id: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.task_id = task_id
        self.details: Mapping[str, Any] = details or {}


class InvalidRequest(ApiError, ValueError):
    """The request cannot be served, now or later."""


class AuthFailed(ApiError, PermissionError):
    """The token is missing or wrong."""


class NotFound(ApiError, LookupError):
    """The task, model or other thing named does not exist."""


class DeadlineExceeded(ApiError, TimeoutError):
    """The deadline has passed, or will certainly pass before the work ends."""


class TaskCancelled(ApiError):
    """The task was cancelled before it ended."""


class Unavailable(ApiError):
    """The server has no room, is not ready or lost the worker: a retry can help."""


_CODES: dict[type[ApiError], str] = {
    InvalidRequest: "invalid_request method_not_allowed body_too_large context_overflow",
    AuthFailed: "unauthenticated forbidden",
    NotFound: "not_found model_not_found",
    DeadlineExceeded: "deadline_exceeded deadline_infeasible",
    TaskCancelled: "cancelled client_disconnected",
    Unavailable: "queue_full rate_limited no_capacity not_ready draining session_busy"
    " instance_lost",
}
_BY_CODE = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_BY_STATUS: dict[int, type[ApiError]] = {
    **dict.fromkeys((401, 403), AuthFailed),
    404: NotFound,
    **dict.fromkeys((429, 503), Unavailable),
    504: DeadlineExceeded,
}


def error_class(code: str, status: int | None) -> type[ApiError]:
    """Error class for a wire code, or for the HTTP status if the code is unknown."""
    if code in _BY_CODE or status is None:
        return _BY_CODE.get(code, ApiError)
    return _BY_STATUS.get(status, InvalidRequest if 400 <= status < 500 else ApiError)
