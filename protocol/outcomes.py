"""The ways in which a request can end, as named in every part of Tidegate (DL-10)."""

from enum import StrEnum
from typing import ClassVar


class Outcome(StrEnum):
    """The outcome of an offered request. Every request gets exactly one."""

    MET = "met"
    PARTIAL = "partial"
    MISSED = "missed"
    REFUSED = "refused"
    ABORTED = "aborted"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a worker stopped generating for a job."""

    STOP = "stop"
    """The model generated an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the context window was reached."""
    DEADLINE = "deadline"
    """Out of time: an error, or a clean end if the client chose ``partial``."""
    CANCELLED = "cancelled"
    """The job was canceled, or its client disconnected."""
    ERROR = "error"
    """An error occurred, or the worker refused the job."""


class AbortCause(StrEnum):
    """Why a caller outside the engine stops a job."""

    CANCEL = "cancel"
    DISCONNECT = "disconnect"
    LANE_LOST = "lane_lost"
    DRAIN = "drain"
    STOP_STRING = "stop_string"
    """The text stage found a stop string; the client does not see an abort."""


class OnDeadline(StrEnum):
    """What a client wants if its deadline comes before its text ends (DL-6)."""

    ERROR = "error"
    PARTIAL = "partial"
    FIT = "fit"
    """Admission reduces ``max_tokens`` to fit the deadline; a worker sees ``PARTIAL``."""
    FINISH = "finish"
    """The worker brings the text to a whole end in time: the end of a sentence, or one that its
    grammar allows (DL-23); ``PARTIAL`` if it does not succeed."""


class Code(StrEnum):
    """Machine-readable reason on the wire, the same in every dialect."""

    INVALID_REQUEST = "invalid_request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    CONTEXT_OVERFLOW = "context_overflow"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    DEADLINE_INFEASIBLE = "deadline_infeasible"
    SESSION_BUSY = "session_busy"
    CANCELLED = "cancelled"
    CLIENT_DISCONNECTED = "client_disconnected"
    RATE_LIMITED = "rate_limited"
    QUEUE_FULL = "queue_full"
    NO_CAPACITY = "no_capacity"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    JOURNAL_UNAVAILABLE = "journal_unavailable"
    """A request that must survive an orchestrator restart cannot be recorded now."""
    INSTANCE_LOST = "instance_lost"
    PROTOCOL_VERSION = "protocol_version"
    LANE_CLOSED = "lane_closed"
    """Between orchestrator and worker: a message names a lane that this worker does not have open.
    """
    SWAP_FAILED = "swap_failed"
    """An instance could not load another model and still serves the old one."""
    ENGINE_ERROR = "engine_error"
    NOT_FINITE = "not_finite"
    """The model's numbers for this text were NaN or infinite."""
    POISON_REQUEST = "poison_request"
    """Two workers died while they worked on this request: it is not retried."""
    INTERNAL = "internal"


class RequestError(ValueError):
    """A request is refused, with ``code``."""

    code: ClassVar[Code] = Code.INVALID_REQUEST
