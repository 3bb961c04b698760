"""Generates checkpoints with random weights in the shapes of real models."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from zlib import crc32

import torch
from safetensors.torch import save_file

from worker.models.config import read_config
from worker.models.model import Decoder

_DEMO: Final = Path(__file__).parents[2] / "worker" / "demo_model" / "checkpoint"
_SHARD_BYTES: Final = 2**30
_NOISE_BYTES: Final = 64 * 2**20
_ROOM_BYTES: Final = 20 * 10**9

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a model, named as in ``config.json``; weights are saved in ``torch_dtype``."""

    architectures: tuple[str]
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool = False
    torch_dtype: str = "bfloat16"
    max_position_embeddings: int = 4096

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, self.torch_dtype).itemsize)

    @property
    def file_bytes(self) -> int:
        return sum(map(prod, tensors_of(self).values())) * self.itemsize


_LLAMA: Final = (("LlamaForCausalLM",), "llama")
_QWEN: Final = (("Qwen2ForCausalLM",), "qwen2")
SHAPES: Final = {
    "0.5b": ModelShape(*_QWEN, 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "1.5b": ModelShape(*_QWEN, 151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "8b": ModelShape(*_LLAMA, 128256, 4096, 14336, 32, 32, 8, max_position_embeddings=131_072),
    "tiny": ModelShape(*_QWEN, 2048, 64, 128, 2, 2, 1, True, max_position_embeddings=1024),
}
"""Shapes by name. ``0.5b`` and ``1.5b``: Qwen2.5; ``8b``: Llama 3.1; ``tiny``: no real model."""


def make_checkpoint(path: Path, shape: ModelShape, seed: int) -> None:
    """Write a checkpoint directory, in shards, with the demo model's tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    noise = _noise(shape, seed)
    write_config(path, shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_DEMO / name, path)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(shape)):
        name = f"model-{number:05}.safetensors"
        weights = {each: _drawn(each, dims, noise) for each, dims in shard.items()}
        save_file(weights, path / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def roomy_folder() -> Path | None:
    """Fastest folder for checkpoints: ``/dev/shm`` if one fits, else None for the default folder of
    temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and shutil.disk_usage(shm).free > _ROOM_BYTES else None


def set_ends(path: Path, shape: ModelShape, mean_tokens: float, seed: int) -> None:
    """Choose random end tokens for a checkpoint. Their number gives answers, sampled from the whole
    vocabulary, a mean length of ``mean_tokens``.

    With random weights, all tokens are about equally likely. So the lengths have a geometric
    distribution, and the generated text does not predict the rest of the length.
    """
    count = max(1, round(shape.vocab_size / mean_tokens))
    ends = random.Random(seed).sample(range(shape.vocab_size), count)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def write_config(path: Path, shape: ModelShape) -> None:
    """Write the ``config.json`` of a checkpoint."""
    settings = asdict(shape) | {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(settings, indent=1))


@cache
def tensors_of(shape: ModelShape) -> dict[str, Dims]:
    """Names and shapes of the tensors that the worker's loader reads from a checkpoint."""
    with TemporaryDirectory() as path:
        write_config(Path(path), shape)
        config = read_config(Path(path))
    return {
        part.name: part.shape
        for parameter in Decoder.parameters(config).values()
        for part in (*parameter.parts, *parameter.bias)
    }


def _noise(shape: ModelShape, seed: int) -> torch.Tensor:
    """Normal random numbers, scaled to keep activations in range. They are drawn once and reused,
    so that the disk is the bottleneck."""
    count = min(_NOISE_BYTES, shape.file_bytes) // shape.itemsize
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return values.mul_(shape.hidden_size**-0.5).to(getattr(torch, shape.torch_dtype))


def _drawn(name: str, dims: Dims, noise: torch.Tensor) -> torch.Tensor:
    """A tensor of noise, from a different offset for each name; norm weights are ones."""
    if name.endswith("norm.weight"):
        return torch.ones(dims, dtype=noise.dtype)
    begin, count = crc32(name.encode()) % len(noise), prod(dims)
    return noise.roll(begin).repeat(-(-count // len(noise)))[:count].reshape(dims)


def _shards(shape: ModelShape) -> Iterator[dict[str, Dims]]:
    shard: dict[str, Dims] = {}
    held = 0
    for name, dims in tensors_of(shape).items():
        shard[name] = dims
        held += prod(dims) * shape.itemsize
        if held >= _SHARD_BYTES:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard
