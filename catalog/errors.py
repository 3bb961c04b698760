"""Errors that can occur before the service runs.

ProvisionError
 ├─ MachineUnfit       the machine lacks something; the message ends with the command that fixes it
 ├─ EngineNotFound     no Triton server where we looked          (also FileNotFoundError)
 │   └─ NoEngine       none was named, and the machine has none: one can be fetched
 ├─ EngineUnknown      no engine of that name, here or at all    (also LookupError)
 ├─ FetchFailed        an engine could not be fetched, or another process is fetching it
 ├─ NoSuchModel        no model of that name, or it is not complete   (also FileNotFoundError)
 ├─ StagingFailed      a model could not be fetched; the files fetched so far are kept
 │   ├─ DamagedModel   a file is not what its format, its name or its digest says
 │   ├─ NoRoom         the disk is full, or would be fuller than it may be
 │   └─ NoMemory       a model does not fit into memory, so it is not loaded ahead
 ├─ CatalogUnusable    the file of models or engines cannot be read or written  (also OSError)
 ├─ PortInUse          another process listens there             (also OSError)
 ├─ StateFileUnusable  the state file cannot be written          (also OSError)
 ├─ LogUnusable        a log file cannot be written              (also OSError)
 ├─ PoolFileInvalid    pool.toml is invalid; the message has a line per mistake  (also ValueError)
 ├─ PoolInUse          another manager keeps the pool, or none does
 ├─ PortsUnguarded     Triton would listen off loopback without asking for tokens
 ├─ StartFailed        a process ended or hung before it was ready; with the useful part of its log
 └─ GaveUp             a process kept failing, so everything was ended

Messages say what was wrong, what was expected and what to do; they are shown to users unchanged.
Standard library only: setup imports this before any dependency is installed.
"""


class ProvisionError(Exception):
    """Base class of all errors that keep the service from running."""


class MachineUnfit(ProvisionError): ...


class EngineNotFound(ProvisionError, FileNotFoundError): ...


class NoEngine(EngineNotFound): ...


class EngineUnknown(ProvisionError, LookupError): ...


class FetchFailed(ProvisionError): ...


class NoSuchModel(ProvisionError, FileNotFoundError): ...


class StagingFailed(ProvisionError): ...


class DamagedModel(StagingFailed): ...


class NoRoom(StagingFailed): ...


class NoMemory(StagingFailed): ...


class CatalogUnusable(ProvisionError, OSError): ...


class PortInUse(ProvisionError, OSError): ...


class StateFileUnusable(ProvisionError, OSError): ...


class LogUnusable(ProvisionError, OSError): ...


class StartFailed(ProvisionError): ...


class GaveUp(ProvisionError): ...


class PoolFileInvalid(ProvisionError, ValueError): ...


class PoolInUse(ProvisionError): ...


class PortsUnguarded(ProvisionError): ...
