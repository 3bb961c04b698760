"""Errors that can occur before the service runs.

ProvisionError
 ├─ MachineUnfit       the machine lacks something; the message ends with the command that fixes it
 ├─ EngineNotFound     no Triton server where we looked          (also FileNotFoundError)
 │   └─ NoEngine       none anywhere: one can be fetched
 ├─ EngineUnknown      no engine of that name, here or at all   (also LookupError)
 ├─ FetchFailed        it could not be fetched, or another process is fetching it
 ├─ NoSuchModel      no model of that name, or none that can be used   (also FileNotFoundError)
 ├─ StagingFailed      a model could not be fetched, or is not what it should be
 │   ├─ DamagedModel   a file is not what its format or its digest says
 │   ├─ NoRoom         the disk is full, or would be fuller than it may be
 │   └─ NoMemory       a model does not fit into memory, so it is not loaded ahead
 ├─ CatalogUnusable    the file of models or engines cannot be read or written  (also OSError)
 ├─ PortInUse another process listens there               (also OSError)
 ├─ StateFileUnusable  the state file cannot be written          (also OSError)
 ├─ LogUnusable        a log file cannot be written              (also OSError)
 ├─ PoolFileInvalid    pool.toml cannot be read, or does not fit     (also ValueError)
 ├─ PoolInUse          another manager keeps the pool, or none does
 ├─ PortsUnguarded     Triton would listen off loopback without asking for tokens
 ├─ StartFailed        a process ended or hung before it was ready
 └─ GaveUp             a process kept failing, so everything was ended

Messages say what was wrong, what was expected and what to do; they are shown to users unchanged.
Standard library only: setup imports this before any dependency is installed.
"""


class ProvisionError(Exception):
    """Base class of all errors that keep the service from running."""


class MachineUnfit(ProvisionError):
    """The machine lacks a required program, package or library."""


class EngineNotFound(ProvisionError, FileNotFoundError):
    """No Triton server in any of the places that were searched."""


class NoEngine(EngineNotFound):
    """No Triton server was named, and the machine has none."""


class EngineUnknown(ProvisionError, LookupError):
    """No engine of that name exists here, or there is no way to get one."""


class FetchFailed(ProvisionError):
    """The Triton server of the wheel, or the packages of an engine, could not be fetched."""


class NoSuchModel(ProvisionError, FileNotFoundError):
    """No model of that name is on this machine, or it is not complete."""


class StagingFailed(ProvisionError):
    """A model could not be fetched; the files fetched so far are kept for the next try."""


class DamagedModel(StagingFailed):
    """A file is truncated or changed, or was never of the type that its name says."""


class NoRoom(StagingFailed):
    """A model does not fit on the disk; a share of the disk stays free."""


class NoMemory(StagingFailed):
    """A model is larger than the memory available to preload it."""


class CatalogUnusable(ProvisionError, OSError):
    """The catalog of models or engines cannot be read or written."""


class PortInUse(ProvisionError, OSError):
    """A requested port is in use."""


class StateFileUnusable(ProvisionError, OSError):
    """The requested state file cannot be written."""


class LogUnusable(ProvisionError, OSError):
    """A log file cannot be written at its path."""


class StartFailed(ProvisionError):
    """A supervised process did not become ready; the message has the useful part of its log."""


class GaveUp(ProvisionError):
    """A supervised process failed repeatedly."""


class PoolFileInvalid(ProvisionError, ValueError):
    """A pool's file is invalid; the message has one line per mistake."""


class PoolInUse(ProvisionError):
    """Another manager runs this pool, or the requested manager does not run."""


class PortsUnguarded(ProvisionError):
    """A Triton would be reachable from other machines without requiring a token."""
