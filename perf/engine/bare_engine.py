"""An engine put together from its parts: no tokenizer, no settings from the environment, no Triton.

``torch`` and ``numpy`` are enough for it, as on a machine that is lent for its GPU.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from worker.attention import KVPool
from worker.attention.choice import Choice, choose_attention
from worker.engine.engine import Engine, EngineConfig
from worker.models.config import ModelConfig, read_config
from worker.models.model import Model, load_model
from worker.runner.cuda_graphs import CudaRecorder, Recorder
from worker.runner.cuda_runner import build_cuda_runner
from worker.runner.forward import BatchForward
from worker.runner.torch_runner import SlotLimits, TorchRunner
from worker.sampling.sampler import Sampler
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler

_BLOCK_TOKENS = 16


@dataclass(slots=True)
class Built:
    """An engine and the parts it was built from."""

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
    recorder: Recorder | None = None,
    max_step_tokens: int = 512,
) -> Built:
    """Build an engine: on CUDA with recorded decodes, elsewhere kernel by kernel."""
    pool = KVPool(
        layers=config.num_layers,
        blocks=blocks + 1,
        block_tokens=_BLOCK_TOKENS,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=getattr(torch, config.dtype),
        device=device,
    )
    choice = choose_attention("auto", pool, config.num_heads)
    max_blocks = min(blocks, config.context_tokens // _BLOCK_TOKENS)
    sampler = Sampler(
        config.eos_token_ids,
        device,
        slots=max_running,
        vocab_size=config.vocab_size,
        max_tokens=max_blocks * _BLOCK_TOKENS,
    )
    runner = build_cuda_runner(
        BatchForward(model, choice.backend),
        sampler,
        SlotLimits(_BLOCK_TOKENS, max_running, max_blocks),
        device=device,
        dummy_block=blocks,
        recorder=recorder or (CudaRecorder() if device.type == "cuda" else None),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            vocab_size=config.vocab_size,
            context_tokens=config.context_tokens,
            block_tokens=_BLOCK_TOKENS,
            max_running=max_running,
            max_waiting=4096,
            max_step_tokens=max(max_step_tokens, max_running),
            min_start_budget_s=0.0,
            prefix_cache=False,
        ),
        BlockPool(blocks),
    )
    engine = Engine(scheduler, runner, EngineConfig(config.eos_token_ids))
    return Built(engine, runner, pool, choice)
