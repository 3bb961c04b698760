"""Which Triton instances there are, as that changes while the service runs.

``sources`` says where addresses come from, ``roster`` keeps the registry in step with them.
"""

from orchestrator.instances.roster import Roster
from orchestrator.instances.sources import DnsName, Source, SourceError, WatchedFile, source_of

__all__ = ["DnsName", "Roster", "Source", "SourceError", "WatchedFile", "source_of"]
