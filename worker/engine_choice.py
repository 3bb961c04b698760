"""Chooses the engine if the settings do not (``TIDEGATE_WORKER__ENGINE=auto``).

Imports no engine: the pool and the launcher also use it, to start a worker with the packages of the
engine that it will choose.
"""

import ast
import json
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from worker.settings import EngineName, WorkerSettings, variable

_REGISTRY: Final = "vllm/model_executor/models/registry.py"
"""vLLM's file with the architectures that it supports."""
_TABLES: Final = frozenset({"_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"})
"""Tables of text generation models in that file; their keys are architectures."""
_ROOM: Final = Path(__file__).parent / "engines/vllm"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and the reason for its choice; ``why`` is empty if the settings name it."""

    name: EngineName
    why: str = ""


def choose_engine(settings: WorkerSettings, packages: Path | None = None) -> EngineChoice:
    """The engine that the settings name, or otherwise the one that fits them. ``packages`` is the
    package folder to search for vLLM; None for this process's packages."""
    if settings.engine != "auto":
        return EngineChoice(settings.engine)
    if settings.tensor_parallel > 1:
        return EngineChoice("vllm", f"{variable('tensor_parallel')} asks for several GPUs")
    if settings.adapters:
        return EngineChoice("vllm", f"{variable('adapters')} names adapters")
    if settings.device == "cpu":
        return EngineChoice("torch", "on the CPU it is the default")
    only_ours = {
        "deterministic": settings.deterministic,
        "kv.disk_path": settings.kv.disk_path is not None,
    }
    for name, is_asked in only_ours.items():
        if is_asked:
            why = f"{variable(name)} asks for what only Tidegate's own engine does"
            return EngineChoice("torch", why)
    return _vllm_or_ours(settings.model_path, packages)


def chosen(settings: WorkerSettings) -> WorkerSettings:
    """The settings, with the engine that this process chooses for them."""
    return settings.model_copy(update={"engine": choose_engine(settings).name})


def vllm_for_cuda(packages: Path | None) -> Distribution | None:
    """The installed vLLM; None if there is none or it is a CPU build."""
    path = sys.path if packages is None else [str(packages)]
    found = next(iter(distributions(name="vllm", path=path)), None)
    return None if found is None or "cpu" in found.version else found


def architectures_of(registry: Path) -> frozenset[str]:
    """Names of the architectures in vLLM's registry. The file is read, not imported: an import
    needs torch and takes seconds. Empty if the file's format has changed."""
    try:
        tree = ast.parse(registry.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names = set[str]()
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=table)], value=ast.Dict(keys=keys))
                | ast.AnnAssign(target=ast.Name(id=table), value=ast.Dict(keys=keys))
            ) if table in _TABLES:
                stated = [key.value for key in keys if isinstance(key, ast.Constant)]
                names.update(key for key in stated if isinstance(key, str))
    return frozenset(names)


def _vllm_or_ours(model: Path, packages: Path | None) -> EngineChoice:
    if not _ROOM.is_dir():
        return EngineChoice("torch", "this worker comes without an engine for vLLM")
    vllm = vllm_for_cuda(packages)
    if vllm is None:
        return EngineChoice(
            "torch",
            "vLLM for CUDA is not among the packages that this worker was started with"
            " (tidegate engines ensure vllm --device cuda installs it)",
        )
    known = architectures_of(Path(str(vllm.locate_file(_REGISTRY))))
    if not known:
        return EngineChoice("torch", f"the list of models of vllm {vllm.version} cannot be read")
    stated = _architectures(model)
    if not stated:
        return EngineChoice("torch", f"{model / 'config.json'} names no architecture")
    if not known.intersection(stated):
        return EngineChoice("torch", f"vllm {vllm.version} has no {', '.join(stated)}")
    return EngineChoice("vllm", f"vllm {vllm.version} is installed and has {', '.join(stated)}")


def _architectures(model: Path) -> tuple[str, ...]:
    try:
        stated = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    listed = stated.get("architectures") if isinstance(stated, dict) else None
    if not isinstance(listed, list):
        return ()
    return tuple(name for name in listed if isinstance(name, str))
