"""Follows which Triton instances there are, as that changes while the service runs.

``sources`` says where addresses come from, ``registered`` has those that are pushed, ``sync`` keeps
the registry in step with them.
"""

from orchestrator.instances.discovery.registered import RegisteredInstances
from orchestrator.instances.discovery.sources import (
    DnsName,
    Source,
    SourceError,
    WatchedFile,
    source_of,
)
from orchestrator.instances.discovery.sync import DiscoverySync

__all__ = [
    "DiscoverySync",
    "DnsName",
    "RegisteredInstances",
    "Source",
    "SourceError",
    "WatchedFile",
    "source_of",
]
