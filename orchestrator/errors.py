"""All errors of requests, as one class tree.

::

    TidegateError                        500 internal
    ├── InvalidRequest (ValueError)      400 invalid_request
    │   ├── ContextOverflow              400 context_overflow
    │   ├── UnsupportedMediaType         415 invalid_request
    │   ├── KeyReused                    422 invalid_request
    │   ├── BodyTooLarge                 413 body_too_large
    │   └── BodyTooSlow                  408 invalid_request
    ├── Unauthenticated                  401 unauthenticated
    ├── Forbidden                        403 forbidden
    ├── NotFound                         404 not_found
    │   ├── ModelNotFound                404 model_not_found
    │   └── MethodNotAllowed             405 method_not_allowed
    ├── DeadlineExceeded (TimeoutError)  504 deadline_exceeded
    │   └── DeadlineInfeasible           504 deadline_infeasible
    ├── SessionBusy                      409 session_busy
    ├── Aborted                          499
    │   ├── Cancelled                        cancelled
    │   └── ClientDisconnected               client_disconnected
    ├── Unavailable                      503, retryable, with Retry-After
    │   ├── KeyInUse                     409 not_ready
    │   ├── RateLimited                  429 rate_limited
    │   ├── QueueFull                    429 queue_full
    │   ├── NoCapacity                   503 no_capacity
    │   ├── NotReady                     503 not_ready
    │   ├── Draining                     503 draining
    │   ├── JournalUnavailable           503 journal_unavailable
    │   └── InstanceLost                 503 instance_lost
    │       └── Gone                     410 instance_lost
    ├── SwapFailed                       409 swap_failed
    └── EngineError                      502 engine_error
        ├── NotFinite                    502 not_finite
        └── PoisonRequest                502 poison_request

A class has its code, the HTTP status for every API dialect, and whether a retry can help;
``details`` are figures for the client. Each dialect has its own format. Messages are safe to show:
they say what was wrong, what was expected and what to do. Quotes of a client's text are shortened
(``excerpt``), and messages have a maximum length too.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Self

from protocol import Code, brief, excerpt

Detail = str | int | float | bool | None


class TidegateError(Exception):
    """A failure that the client did not cause; base of all errors. ``field``: the wrong field."""

    status: ClassVar[int] = 500
    code: ClassVar[Code] = Code.INTERNAL
    retryable: bool = False
    item_id: str = ""
    """Id of an unknown item; another orchestrator may know it (``api.http.forwarding``)."""
    due_at: float | None = None
    """Deadline of the refused task, in seconds of the clock; it may come from the task's run."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> None:
        # Headers may hold bytes that are not text; error messages must be text.
        message = brief(message.encode(errors="replace").decode())
        super().__init__(message)
        self.message = message
        self.field = None if field is None else excerpt(field)
        self.details = dict(details or {})


class InvalidRequest(TidegateError, ValueError):
    """The request is malformed or asks for something that does not exist."""

    status = 400
    code = Code.INVALID_REQUEST


class ContextOverflow(InvalidRequest):
    """Prompt and answer together do not fit into the model's context."""

    code = Code.CONTEXT_OVERFLOW

    @classmethod
    def of_prompt(
        cls, prompt: int, context: int, note: str = "", *, is_least: bool = False
    ) -> Self:
        """Error for a prompt that is too long on its own. ``note`` is the model card's addition to
        the message; ``prompt`` and ``context`` are in tokens, ``prompt`` a lower bound if
        ``is_least``."""
        least = "at least " if is_least else ""
        return cls(
            # Clients look for these words: "this model's maximum context length is … tokens".
            f"the prompt has {least}{prompt} tokens, but this model's maximum context length is "
            f"{context} tokens, which must hold it and at least one more: shorten the prompt{note}",
            field="prompt",
            details={"prompt_tokens": prompt, "context_tokens": context},
        )

    @classmethod
    def of_answer(cls, prompt: int, asked: int, context: int, note: str = "") -> Self:
        """Error for a ``max_tokens`` (``asked``) beyond what the context leaves; all in tokens."""
        left = context - prompt
        return cls(
            f"max_tokens is {asked}, but this model's maximum context length is {context} tokens, "
            f"which leaves {left} after a prompt of {prompt}: ask for at most {left}{note}",
            field="max_tokens",
            details={"prompt_tokens": prompt, "context_tokens": context},
        )


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared as plain JSON."""

    status = 415


class KeyReused(InvalidRequest):
    """An idempotency key already names another request. Not 409, which would suggest a retry."""

    status = 422

    @classmethod
    def by_header(cls) -> Self:
        return cls(
            "this Idempotency-Key was used with another body; use a new key for another task",
            field="Idempotency-Key",
        )


class BodyTooLarge(InvalidRequest):
    """The body exceeds the configured limit."""

    status = 413
    code = Code.BODY_TOO_LARGE


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""

    status = 408


class Unauthenticated(TidegateError):
    """The token is missing or wrong."""

    status = 401
    code = Code.UNAUTHENTICATED


class Forbidden(TidegateError):
    """The caller or its address is known but is not allowed to do this."""

    status = 403
    code = Code.FORBIDDEN


class NotFound(TidegateError):
    """The requested item does not exist."""

    status = 404
    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """No instance serves a model of that name."""

    code = Code.MODEL_NOT_FOUND


class MethodNotAllowed(NotFound):
    """The path exists, but not for this method."""

    status = 405
    code = Code.METHOD_NOT_ALLOWED

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class DeadlineExceeded(TidegateError, TimeoutError):
    """The client's deadline has passed, or is too near for the remaining work (DL-3, DL-5).
    ``exceeded_by_ms`` is None if it has not passed yet. ``part`` is the part of the answer with
    that deadline, empty for the whole (DL-14)."""

    status = 504
    code = Code.DEADLINE_EXCEEDED

    def __init__(
        self, message: str, *, exceeded_by_ms: float | None = None, part: str = ""
    ) -> None:
        self.exceeded_by_ms: float | None = None
        details: dict[str, Detail] = {}
        if exceeded_by_ms is not None:
            details["exceeded_by_ms"] = self.exceeded_by_ms = round(max(0.0, exceeded_by_ms), 3)
        super().__init__(message, details=details | {"part": part} if part else details)

    @classmethod
    def before(cls, what: str, late_s: float, part: str = "") -> "DeadlineExceeded":
        """Error for a deadline that passed ``late_s`` ago, while the request waited."""
        message = f"the deadline passed before {what}"
        return DeadlineExceeded(message, exceeded_by_ms=1000 * late_s, part=part)


class DeadlineInfeasible(DeadlineExceeded):
    """The deadline has not passed yet but is certain to be missed (DL-7).
    ``earliest_feasible_unix_ms``: the earliest deadline that can be kept, in epoch milliseconds."""

    code = Code.DEADLINE_INFEASIBLE

    def __init__(
        self,
        message: str,
        *,
        predicted_finish_ms: float,
        earliest_feasible_unix_ms: int,
        binding_constraint: str,
        part: str = "",
    ) -> None:
        super().__init__(message, part=part)
        self.details |= {
            "predicted_finish_ms": round(predicted_finish_ms, 1),
            "earliest_feasible_deadline": earliest_feasible_unix_ms,
            "binding_constraint": binding_constraint,
        }


class SessionBusy(TidegateError):
    """The session is busy: it has one turn at a time. Clients must not retry automatically, because
    the conversation will have changed by then."""

    status = 409
    code = Code.SESSION_BUSY


class Aborted(TidegateError):
    """A party that may abort the work no longer wants the answer."""

    status = 499
    code = Code.CANCELLED


class Cancelled(Aborted):
    """Cancelled through the API."""


class ClientDisconnected(Aborted):
    """The client disconnected, or reads too slowly to be served."""

    code = Code.CLIENT_DISCONNECTED


class Unavailable(TidegateError):
    """The service cannot do this now; ``retry_after_ms`` says when to retry (OR-4)."""

    status = 503
    code = Code.NO_CAPACITY
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        retry_after_ms: float = 1000.0,
        retryable: bool = True,
        field: str | None = None,
    ) -> None:
        self.retry_after_ms = math.ceil(retry_after_ms)
        self.retryable = retryable
        details = {"retry_after_ms": self.retry_after_ms} if retryable else None
        super().__init__(message, field=field, details=details)


class RateLimited(Unavailable):
    """The key, or all keys together, have reached a limit (OR-12)."""

    status = 429
    code = Code.RATE_LIMITED


class QueueFull(Unavailable):
    """The queue is at its bound."""

    status = 429
    code = Code.QUEUE_FULL

    @classmethod
    def for_ever(cls, message: str, *, field: str) -> Self:
        """Error for a request that does not even fit into an empty queue; not retryable."""
        return cls(message, retryable=False, field=field)


class NoCapacity(Unavailable):
    """The instances that could serve this request have no room left."""


class NotReady(Unavailable):
    """No instance that serves the request is up."""

    code = Code.NOT_READY


class KeyInUse(Unavailable):
    """The first submission with this idempotency key is still undecided."""

    status = 409
    code = Code.NOT_READY


class Draining(Unavailable):
    """The service is shutting down and takes no new work."""

    code = Code.DRAINING


class JournalUnavailable(Unavailable):
    """A durable task cannot be journaled: the disk write fails."""

    code = Code.JOURNAL_UNAVAILABLE


class InstanceLost(Unavailable):
    """The instance that worked on the request was lost."""

    code = Code.INSTANCE_LOST


class Gone(InstanceLost):
    """The orchestrator that had the work is gone: the client may submit it again."""

    status = 410

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class EngineError(TidegateError):
    """The engine failed on this request; a retry is likely to fail too."""

    status = 502
    code = Code.ENGINE_ERROR


class NotFinite(EngineError):
    """The model's numbers for this text were NaN or infinite."""

    code = Code.NOT_FINITE


class PoisonRequest(EngineError):
    """Two workers died while they served the request."""

    code = Code.POISON_REQUEST


class SwapFailed(TidegateError):
    """An instance could not load another model; it still serves its old one."""

    status = 409
    code = Code.SWAP_FAILED


def with_code(code: str, message: str) -> TidegateError:
    """Rebuild an error from its code and message in the journal: an instance of the first class
    above with that code, or of ``TidegateError`` if none has it."""
    classes = [TidegateError]
    for one in classes:  # grows: a class comes before its subclasses
        classes += one.__subclasses__()
    found = next((one for one in classes if one.code == code), TidegateError)
    error = found.__new__(found)
    TidegateError.__init__(error, message)
    return error
