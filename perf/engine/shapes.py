"""Checkpoints with random weights in the shapes of real models."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from worker.models.config import read_config
from worker.models.decoder import Decoder

_DEMO: Final = Path(__file__).parents[2] / "worker" / "demo_model" / "checkpoint"
_SHARD_BYTES: Final = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """Names as in ``config.json``; ``dtype`` is what the weights are saved in."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    dtype: str = "bfloat16"
    context: int = 4096


SHAPES: Final = {
    "0.5b": Shape("Qwen2ForCausalLM", "qwen2", 151936, 896, 4864, 24, 14, 2, True),
    "1.5b": Shape("Qwen2ForCausalLM", "qwen2", 151936, 1536, 8960, 28, 12, 2, True),
    "8b": Shape("LlamaForCausalLM", "llama", 128256, 4096, 14336, 32, 32, 8, False),
    "small": Shape("Qwen2ForCausalLM", "qwen2", 8192, 384, 1024, 6, 6, 2, True),
    "tiny": Shape("Qwen2ForCausalLM", "qwen2", 2048, 64, 128, 2, 2, 1, True, context=1024),
}
"""``0.5b`` and ``1.5b``: Qwen2.5; ``8b``: Llama 3.1; the others are nobody's."""


def make_checkpoint(path: Path, shape: Shape, seed: int) -> Path:
    """Write a checkpoint directory, in shards, with the demo model's tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    write_config(path, shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_DEMO / name, path)
    _write_weights(path, getattr(torch, shape.dtype), seed)
    return path


def write_config(path: Path, shape: Shape) -> None:
    """Write ``config.json``."""
    settings = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": shape.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(settings, indent=1))


def _write_weights(path: Path, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = {
        part.name: part
        for parameter in Decoder.parameters(read_config(path)).values()
        for part in (*parameter.parts, *parameter.bias)
    }
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    files = 0
    for i, (name, part) in enumerate(parts.items(), 1):
        if "norm" in name:
            shard[name] = torch.ones(part.shape, dtype=dtype)
        else:
            shard[name] = torch.empty(part.shape, dtype=dtype).normal_(0, 0.02, generator=generator)
        if i == len(parts) or sum(t.nbytes for t in shard.values()) > _SHARD_BYTES:
            files += 1
            file = f"model-{files:05d}.safetensors"
            save_file(shard, path / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
