"""A checkpoint of a real shape with random weights, and an engine over it.

Put together from the engine's parts: no tokenizer, no settings from the environment, no Triton.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from worker.attention import KVPool
from worker.attention.choice import AttentionSetting, Choice, choose_attention
from worker.engine.engine import Engine
from worker.models.config import ModelConfig, read_config
from worker.models.model import Model, load_model
from worker.runner.cuda_graphs import CudaRecorder, Recorder
from worker.runner.cuda_runner import build_cuda_runner
from worker.runner.forward import BatchForward
from worker.runner.torch_runner import TorchRunner
from worker.sampling.sampler import Sampler
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.scheduler import Scheduler, SchedulerConfig

_SHARD_BYTES: Final = 2 * 2**30
_NOISE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama, as its ``config.json`` says it."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    dtype: str

    @property
    def layer_parameters(self) -> int:
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (heads + 3 * self.inner + 2)

    @property
    def step_bytes(self) -> int:
        """Weights that a decode reads: all but the embedding, of which it takes a few rows."""
        parameters = self.layers * self.layer_parameters + self.hidden * (self.vocab + 1)
        return parameters * self.itemsize

    @property
    def file_bytes(self) -> int:
        return self.step_bytes + self.hidden * self.vocab * self.itemsize

    @property
    def kv_token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)


LLAMA_8B: Final = Shape(32, 4096, 14336, 32, 8, 128, 128256, 4096, "bfloat16")
TINY: Final = Shape(2, 64, 96, 4, 2, 16, 300, 256, "float32")


def write_checkpoint(path: Path, shape: Shape, *, within_s: float) -> tuple[Shape, float]:
    """Write shards of random weights; → what was written, and seconds.

    When the disk is too slow or too full for all of it, with fewer layers.
    """
    path.mkdir(parents=True, exist_ok=True)
    probe = path / "probe"
    noise = _noise(shape)
    started = time.monotonic()
    with probe.open("wb") as out:
        for _ in range(4):
            out.write(noise)
        os.fsync(out.fileno())
    rate = 4 * len(noise) / (time.monotonic() - started)
    probe.unlink()
    room = os.statvfs(path)
    affordable = min(rate * within_s, room.f_bavail * room.f_frsize * 0.7)
    fixed = shape.file_bytes - shape.layers * shape.layer_parameters * shape.itemsize
    layers = int((affordable - fixed) / (shape.layer_parameters * shape.itemsize))
    shape = replace(shape, layers=max(1, min(shape.layers, layers)))

    started = time.monotonic()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(shape)):
        name = f"model-{number:05}.safetensors"
        _write_shard(path / name, shard, shape, noise)
        weight_map |= dict.fromkeys(shard, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    return shape, time.monotonic() - started


def _noise(shape: Shape) -> memoryview:
    """Normal numbers of a size that keeps activations in range, as bytes."""
    count = min(_NOISE_BYTES, shape.file_bytes) // shape.itemsize
    scale = shape.hidden**-0.5
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator).mul_(scale).to(getattr(torch, shape.dtype))
    return memoryview(values.view(torch.uint8).numpy().tobytes())


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (shape.hidden,)
        yield layer + "self_attn.q_proj.weight", (q, shape.hidden)
        yield layer + "self_attn.k_proj.weight", (kv, shape.hidden)
        yield layer + "self_attn.v_proj.weight", (kv, shape.hidden)
        yield layer + "self_attn.o_proj.weight", (shape.hidden, q)
        yield layer + "post_attention_layernorm.weight", (shape.hidden,)
        yield layer + "mlp.gate_proj.weight", (shape.inner, shape.hidden)
        yield layer + "mlp.up_proj.weight", (shape.inner, shape.hidden)
        yield layer + "mlp.down_proj.weight", (shape.hidden, shape.inner)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _shards(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, dims in _tensors(shape):
        shard[name] = dims
        held += int(np.prod(dims)) * shape.itemsize
        if held >= _SHARD_BYTES:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard


def _write_shard(
    file: Path, shard: dict[str, tuple[int, ...]], shape: Shape, noise: memoryview
) -> None:
    """A safetensors file: length and text of the header, then the tensors one after the other."""
    header, end = {}, 0
    kind = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[shape.dtype]
    for name, dims in shard.items():
        begin, end = end, end + int(np.prod(dims)) * shape.itemsize
        header[name] = {"dtype": kind, "shape": dims, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    at = 0
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        left = end
        while left:
            piece = noise[at : at + min(left, len(noise) - at)]
            out.write(piece)
            left -= len(piece)
            at = (at + len(piece)) % len(noise)
        out.flush()
        os.fsync(out.fileno())


@dataclass(slots=True)
class Built:
    """An engine and its parts."""

    engine: Engine
    runner: TorchRunner
    pool: KVPool
    attention: Choice


def load(path: Path, device: torch.device) -> tuple[Model, ModelConfig]:
    config = read_config(path)
    model = load_model(path, config, getattr(torch, config.dtype), device)
    return model, config


def build(
    model: Model,
    config: ModelConfig,
    device: torch.device,
    *,
    max_running: int,
    blocks: int,
    attention: AttentionSetting = "auto",
    overlap: bool = True,
    recorder: Recorder | None = None,
    block_tokens: int = 16,
    max_step_tokens: int = 512,
    prefix_cache: bool = False,
) -> Built:
    """On CUDA with recorded decodes; elsewhere kernel by kernel."""
    pool = KVPool(
        layers=config.num_layers,
        blocks=blocks + 1,
        block_tokens=block_tokens,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=getattr(torch, config.dtype),
        device=device,
    )
    choice = choose_attention(attention, pool, config.num_heads)
    max_blocks = min(blocks, config.context_tokens // block_tokens)
    sampler = Sampler(
        config.eos_token_ids,
        device,
        slots=max_running,
        vocab_size=config.vocab_size,
        max_tokens=max_blocks * block_tokens,
    )
    runner = build_cuda_runner(
        BatchForward(model, choice.backend),
        sampler,
        device=device,
        block_tokens=block_tokens,
        max_running=max_running,
        max_blocks=max_blocks,
        dummy_block=blocks,
        recorder=recorder or (CudaRecorder() if device.type == "cuda" else None),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            vocab_size=config.vocab_size,
            context_tokens=config.context_tokens,
            block_tokens=block_tokens,
            max_running=max_running,
            max_waiting=4096,
            max_step_tokens=max(max_step_tokens, max_running),
            min_start_budget_s=0.0,
            prefix_cache=prefix_cache,
        ),
        BlockPool(blocks),
    )
    engine = Engine(scheduler, runner, config.eos_token_ids, overlap=overlap)
    return Built(engine, runner, pool, choice)
