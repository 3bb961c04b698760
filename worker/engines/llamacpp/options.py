"""Reads and checks ``TIDEGATE_WORKER__ENGINE_ARGS``: llama.cpp's settings by its own names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from worker.encoding import openable

CACHE_TYPES: Final = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
}
"""Types that KV cells can have, with their numbers in ``ggml_type``."""
CELL_BYTES: Final = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
    "q8_0": 34 / 32,
}
"""Bytes that one value of each type takes."""
LOAD_MODES: Final = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
SPLIT_MODES: Final = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
FLASH_ATTENTION: Final = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of llama.cpp; None: llama.cpp's default, or that of the worker's other settings."""

    n_gpu_layers: int | None = None
    """Layers on the GPU; by default all with ``device=cuda``. None are with ``cpu``."""
    threads: int | None = None
    threads_batch: int | None = None
    """Threads for prompts; by default as many as ``threads``."""
    n_ubatch: int | None = None
    """Tokens of a step that are computed at a time."""
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    load_mode: str = "auto"
    split_mode: str = "layer"
    main_gpu: int | None = None
    kv_unified: bool | None = None
    """Whether all texts share one pool of KV cells, instead of having an equal part each."""
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    repack: bool = True
    """Whether weights are reordered for this CPU's speed; if not, they stay in the mapped file."""
    tokenizer: Path | None = None
    """Folder with the model's original ``tokenizer.json``, for files whose kind of vocabulary
    cannot be read here."""


def read_options(stated: Mapping[str, str]) -> Options:
    """Parse the operator's settings. Raises ``ValueError`` that names the fault and a remedy."""
    readers = {field.name: _reader(field.name) for field in fields(Options)}
    found: dict[str, Any] = {}
    for name, text in stated.items():
        if name not in readers:
            near = get_close_matches(name, readers, 1)
            meant = f"did you mean {near[0]}? It" if near else "it"
            raise ValueError(
                f"TIDEGATE_WORKER__ENGINE_ARGS: the llamacpp engine has no {name!r}; {meant} takes"
                f" {', '.join(readers)}"
            )
        try:
            found[name] = readers[name](text)
        except ValueError as error:
            raise ValueError(f"TIDEGATE_WORKER__ENGINE_ARGS: {name}={text!r}: {error}") from None
    return Options(**found)


def _reader(name: str) -> Callable[[str], Any]:
    match name:
        case "type_k" | "type_v":
            return _one_of(CACHE_TYPES)
        case "flash_attn":
            return _one_of(FLASH_ATTENTION)
        case "load_mode":
            return _one_of(LOAD_MODES)
        case "split_mode":
            return _one_of(SPLIT_MODES)
        case "kv_unified" | "repack":
            return _flag
        case "rope_freq_base" | "rope_freq_scale":
            return _positive
        case "tokenizer":
            return lambda text: openable(Path(text))
        case "threads" | "threads_batch" | "n_ubatch":
            return lambda text: _whole(text, 1)
        case "main_gpu":
            return lambda text: _whole(text, 0)
        case _:
            return lambda text: _whole(text, -1)


def _one_of(names: Mapping[str, int]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text.lower()

    return read


def _flag(text: str) -> bool:
    known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in known:
        raise ValueError("expected true or false")
    return known[text.lower()]


def _whole(text: str, least: int) -> int:
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise ValueError(f"expected a whole number from {least} on")
    return int(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("expected a number above 0")
    return value
