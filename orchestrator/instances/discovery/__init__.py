"""Follows which Triton instances there are, as that changes while the service runs.

``sources`` says where addresses come from, ``sync`` has those that are pushed, and keeps
the registry in step with them.
"""

from orchestrator.instances.discovery.sources import source_of
from orchestrator.instances.discovery.sync import DiscoverySync

__all__ = ["DiscoverySync", "source_of"]
