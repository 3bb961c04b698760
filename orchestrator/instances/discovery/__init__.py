"""Which Triton instances there are, as that changes while the service runs.

``sources`` says where addresses come from, ``sync`` keeps the registry in step with them.
"""

from orchestrator.instances.discovery.sources import (
    DnsName,
    Source,
    SourceError,
    WatchedFile,
    source_of,
)
from orchestrator.instances.discovery.sync import DiscoverySync

__all__ = ["DiscoverySync", "DnsName", "Source", "SourceError", "WatchedFile", "source_of"]
