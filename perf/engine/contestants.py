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
    """An engine of ``TIDEGATE_WORKER__ENGINE``; ``gguf``: it reads a copy of the model in GGUF."""

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
    gguf: bool = False

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
CONTESTANTS: Final = {
    one.name: one
    for one in (
        Contestant("torch", _F32),
        Contestant("transformers", _F32),
        Contestant("vllm", _F32),
        Contestant("llamacpp", {"engine_args": {"type_k": "f32", "type_v": "f32"}}, gguf=True),
    )
}
