"""The engines that ``--engine`` compares, each in a process and, where it has one, an environment
of its own."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from catalog.paths import state_dir
from pool.engines.environments import environment_if_made


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine of ``TIDEGATE_WORKER__ENGINE``."""

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Python interpreter that has the engine's packages."""
        made = environment_if_made(self.name, state_dir()).get("VIRTUAL_ENV")
        return Path(made, "bin", "python") if made else Path(sys.executable)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the engine's process."""
        return dict(os.environ) | dict(environment_if_made(self.name, state_dir()))


_F32: Final = {"dtype": "float32"}
CONTESTANTS: Final = {name: Contestant(name, _F32) for name in ("torch", "vllm")}
