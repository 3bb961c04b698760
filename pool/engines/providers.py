"""Chooses the provider that brings an engine here, by the engine's name."""

from dataclasses import dataclass
from pathlib import Path

from catalog.engine_entry import ComputeMode
from pool.engines.environments import EnvironmentProvider
from pool.engines.recipes import recipe_of
from pool.engines.toolchain import toolchain
from pool.engines.triton_provider import TritonProvider


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The request of ``tidegate engines ensure``. ``mode`` None means a GPU if there is one."""

    engine: str
    mode: ComputeMode | None = None
    from_source: bool = False
    path: Path | None = None
    """Path of a Triton to use."""
    allow_system_packages: bool = False


def provider_of(request: EngineRequest, home: Path) -> TritonProvider | EnvironmentProvider:
    """The provider for ``request``. Raises ``EngineUnknown``."""
    if request.engine == "triton":
        return TritonProvider(request.path)
    tools = toolchain(home)
    mode: ComputeMode = request.mode or ("cuda" if tools.gpus else "cpu")
    recipe = recipe_of(request.engine, mode, tools, from_source=request.from_source)
    return EnvironmentProvider(recipe, request.allow_system_packages)
