"""The worker's exceptions. Their messages say what was expected and what to do.

::

    LoadError                          the worker cannot start
    ├── DeviceUnavailable (RuntimeError)
    ├── CheckpointError (ValueError)
    │   ├── UnsupportedModel           a valid checkpoint that this worker does not support
    │   └── BrokenCheckpoint           files missing, corrupt or inconsistent
    ├── TokenizerError (ValueError)
    ├── EngineMissing (ImportError)    the requested engine is not installed
    └── NotDeterministic (RuntimeError)
    RequestError (ValueError)          one request is refused, with ``code``
    ├── InvalidCall
    ├── LaneNotOpen
    ├── ContextOverflow
    ├── Unauthenticated
    └── WorkerDraining
    MemoryLimitExceeded (MemoryError)
    DeviceLost (RuntimeError)         nothing more can be computed in this process
    ResponderLost

``InvalidSampling`` is the protocol's own: orchestrator and worker raise it.
"""

import msgspec

from protocol import Code, InvalidSampling
from protocol.outcomes import RequestError as RequestError
from worker.encoding import readable


class LoadError(Exception):
    """The worker cannot start with these settings, files or on this machine."""

    def __str__(self) -> str:
        return readable(super().__str__())  # paths in it may not be valid Unicode


class DeviceUnavailable(LoadError, RuntimeError):
    """The requested device cannot be used."""


class CheckpointError(LoadError, ValueError):
    """The checkpoint cannot be served; the message names the file or setting."""


class UnsupportedModel(CheckpointError):
    """The checkpoint needs a feature that this worker does not have."""


class BrokenCheckpoint(CheckpointError):
    """A file is missing or corrupt, or configuration and weights do not match."""


class TokenizerError(LoadError, ValueError):
    """The checkpoint's tokenizer is missing or cannot be used."""


class EngineMissing(LoadError, ImportError):
    """Packages of the requested engine are missing; the message has the install command."""


class NotDeterministic(LoadError, RuntimeError):
    """This machine's kernels make a token's result depend on the rest of its batch."""


class InvalidCall(RequestError):
    """The request breaks the contract."""


class LaneNotOpen(RequestError):
    """The request names a lane that this worker does not have; another instance may have it."""

    code = Code.LANE_CLOSED


class ContextOverflow(RequestError):
    """Prompt and answer do not fit in the model's context; the message says what fits."""

    code = Code.CONTEXT_OVERFLOW


class Unauthenticated(RequestError):
    """The request has a wrong access token or none."""

    code = Code.UNAUTHENTICATED


class WorkerDraining(RequestError):
    """The worker accepts no more work."""

    code = Code.DRAINING


class MemoryLimitExceeded(MemoryError):
    """The worker exceeds its hard memory limit; the message says by how much and what to change."""


class DeviceLost(RuntimeError):
    """The device no longer computes for this process: only a new process can use it again."""


class ResponderLost(Exception):
    """Triton refused a response: the request is dead, stop working for it."""


def code_of(error: Exception) -> Code:
    """The client's error code: any error that its request did not cause is our failure."""
    if isinstance(error, RequestError):
        return error.code
    is_malformed = isinstance(error, InvalidSampling | msgspec.DecodeError)
    return Code.INVALID_REQUEST if is_malformed else Code.INTERNAL
