"""Defines an engine on this machine, however it came here.

A provider finds or makes one; its result names everything that decides what the engine does, and
stands in the engine catalog under an id of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

ComputeMode = Literal["cpu", "cuda"]
EnvironmentVars = Mapping[str, str]
"""Variables of a process, which override those that it has."""


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine as the catalog keeps it. ``created_ms`` is Unix time."""

    id: str
    engine: str
    """``triton``, ``vllm``, ``llamacpp``."""
    version: str
    build_ref: str
    """Source it was made from: ``wheel nvidia-pytriton==0.7.0``, ``path /opt/tritonserver``."""
    created_ms: int
    digest: str = ""
    """Hex SHA-256 over what was installed."""
    build_flags: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    """Paths that belong to this engine alone."""
    compute_mode: ComputeMode = "cpu"
    binary: str = ""
    files: tuple[str, ...] = ()
    """Paths of the files that ``digest`` is over, in its order; empty for an environment of
    packages, whose records have them."""


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine that can be started."""

    name: str
    version: str
    build_ref: str
    digest: str
    flags: tuple[str, ...]
    compute_mode: ComputeMode
    binary: Path
    """The server, or the Python of its environment."""
    catalog_id: str
    environment: EnvironmentVars = field(default_factory=dict)
    """Variables for the process that runs it."""
