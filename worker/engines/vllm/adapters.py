"""LoRA adapters: checks them against their base model and loads them into vLLM.

vLLM refuses adapters that it does not support (DoRA, biases and the like), but it trusts a folder:
it ignores layers that the model does not have, and reports different shapes with a traceback, if at
all. So this module checks the files first.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from protocol import Adapter
from protocol.model_digest import files_digest
from worker.errors import BrokenCheckpoint
from worker.settings import WorkerSettings, variable

_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``max_lora_rank``."""
_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_FACTOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_LAYER: Final = re.compile(r"(.+\.layers)\.\d+")
_Shapes = Mapping[str, tuple[int, ...]]


def adapter_defaults(settings: WorkerSettings) -> dict[str, str]:
    """The arguments that vLLM needs for the adapters, by its names; none without adapters.

    Raises ``BrokenCheckpoint`` for an adapter of another model or one that cannot be read.
    """
    if not settings.adapters:
        return {}
    stated = settings.engine_args.get("max_lora_rank", "")
    most = int(stated) if stated.isdigit() else _RANKS[-1]
    base = _shapes(settings.model_path.glob("*.safetensors"))
    rank = max(_rank_of(path, base, name, most) for name, path in settings.adapters.items())
    # All of them stay loaded, so that no adapter waits for another one's texts to end. On the CPU,
    # vLLM uses the last slot's weights for texts without an adapter in a batch with adapters, so
    # that slot stays empty.
    places = len(settings.adapters) + (settings.device == "cpu")
    return {
        "enable_lora": "true",
        "max_loras": str(places),
        "max_lora_rank": str(next(one for one in _RANKS if one >= rank)),
    }


def adapters_of(settings: WorkerSettings) -> tuple[Adapter, ...]:
    """The adapters as the card has them."""
    return tuple(
        Adapter(name, files_digest([path / _CONFIG, path / _WEIGHTS]))
        for name, path in settings.adapters.items()
    )


def load_adapters(core: Any, settings: WorkerSettings) -> dict[str, Any]:
    """Load the adapters into vLLM's engine ``core``; returns a ``LoRARequest`` for each, by name.
    Raises ``BrokenCheckpoint`` with vLLM's message."""
    from vllm.lora.request import LoRARequest

    loaded = {}
    for number, (name, path) in enumerate(settings.adapters.items(), 1):
        loaded[name] = request = LoRARequest(name, number, str(path))
        try:
            core.add_lora(request)
        except Exception as error:  # of many kinds, as it finds the files
            raise BrokenCheckpoint(f"{_named(name)}: vLLM does not take it: {error}") from error
    return loaded


def _named(name: str) -> str:
    return f"the adapter {name} of {variable('adapters')}"


def _rank_of(path: Path, base: _Shapes, name: str, most: int) -> int:
    """The maximum rank in an adapter. Raises ``BrokenCheckpoint`` if it does not fit the model."""
    try:
        stated = int(json.loads((path / _CONFIG).read_text(encoding="utf-8"))["r"])
        shapes = _shapes([path / _WEIGHTS])
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise BrokenCheckpoint(
            f"{_named(name)} cannot be read, as PEFT writes it, from {path} ({_CONFIG} and"
            f" {_WEIGHTS}): {error}"
        ) from error
    factors = {found: shapes[key] for key in shapes if (found := _FACTOR.fullmatch(key))}
    if problem := _misfit(factors, base):
        raise BrokenCheckpoint(f"{_named(name)} ({path}) cannot be served: {problem}")
    rank = max([stated, *(shape[0] for found, shape in factors.items() if found[2] == "A")])
    if rank > most:
        raise BrokenCheckpoint(
            f"{_named(name)} has rank {rank}, more than the {most} that vLLM takes at most"
            " (max_lora_rank in TIDEGATE_WORKER__ENGINE_ARGS lowers that)"
        )
    return rank


def _misfit(factors: Mapping[re.Match[str], tuple[int, ...]], base: _Shapes) -> str:
    """Why ``factors``, with their shapes, do not fit a model with weights ``base``; empty if they
    seem to fit, or if ``base`` names its weights differently (for example, packed)."""
    if not factors:
        return f"{_WEIGHTS} has no weights of LoRA"
    layers = {found[0]: found[1] for name in base if (found := _LAYER.match(name))}
    for factor, shape in factors.items():
        layer, of_base = _LAYER.match(factor[1]), base.get(f"{factor[1]}.weight")
        if layer and layer[1] in layers.values() and layer[0] not in layers:
            return f"it is for another model: this one has no {layer[0]}"
        side = 1 if factor[2] == "A" else 0
        if of_base is not None and shape[side] != of_base[side]:
            return (
                f"it is for another model: its {factor[1]} has {shape[side]}"
                f" {'inputs' if side else 'outputs'}, and the model's has {of_base[side]}"
            )
    return ""


def _shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in safetensors files, by name."""
    found = {}
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                found[name] = tuple(opened.get_slice(name).get_shape())
    return found
