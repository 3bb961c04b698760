"""Estimates an instance's memory from its files before it starts (PV-2).

The estimate is conservative; a stated figure overrides it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from worker.settings import BLOCK_TOKENS

GIB = 2**30
CUDA_CONTEXT_BYTES = GIB // 2
"""Bytes of an idle process on a GPU: driver, kernels, workspaces."""
ACTIVATIONS_SHARE = 0.05
"""Memory for steps, as a share of the weights."""
KV_SHARE = 0.1
"""Memory for KV, as a share of the weights, if the model's shape is not known."""
_WEIGHTS = (".safetensors", ".gguf", ".bin")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def need_of(
    model: Path, engine: str = "", dtype: str = "", kv_blocks: int = 0, *, on_gpu: bool
) -> int:
    """Bytes that a checkpoint folder or a .gguf file needs with a worker's settings. Made-up tokens
    (``engine = synthetic-…``) need no weights.

    The KV cache is ``kv_blocks``, else one whole context; the worker uses more if memory is free.
    """
    if engine.startswith("synthetic"):
        return GIB // 4
    files = _files(model)
    on_disk = sum(file.stat().st_size for file in files)
    config = _config(model)
    stored = _BYTES.get(str(config.get("torch_dtype") or config.get("dtype")), 2)
    wanted = _BYTES.get(dtype, stored)
    is_gguf = any(file.suffix == ".gguf" for file in files)
    weights = on_disk if is_gguf else on_disk * wanted // stored
    kv = _kv_bytes(config, kv_blocks, wanted)
    other = int(weights * ACTIVATIONS_SHARE) + (CUDA_CONTEXT_BYTES if on_gpu else GIB // 4)
    return weights + (int(weights * KV_SHARE) if kv is None else kv) + other


def _files(model: Path) -> list[Path]:
    """The weight files. If a folder has several formats, the first has every weight once."""
    if model.is_file():
        return [model]
    for ending in _WEIGHTS:
        found = sorted(model.glob(f"*{ending}"))
        if found:
            return found
    return []


def _config(model: Path) -> dict[str, object]:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _kv_bytes(config: Mapping[str, object], blocks: int, value_bytes: int) -> int | None:
    """Bytes of ``blocks``, or of one context for 0; None if the model's shape is not known."""
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    hidden, context = _number(config, "hidden_size"), _number(config, "max_position_embeddings")
    if not (layers and heads and hidden and context):
        return None
    head_dim = _number(config, "head_dim") or hidden // heads
    kv_heads = _number(config, "num_key_value_heads") or heads
    tokens = blocks * BLOCK_TOKENS if blocks else context
    return 2 * layers * kv_heads * head_dim * tokens * max(value_bytes, 2)


def _number(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0
