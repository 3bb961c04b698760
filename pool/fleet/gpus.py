"""The GPUs for instances: checks free memory before a start (PV-2).

NVML's answers are cached for at most one heartbeat. Two instances that start at the same time would
both see the same free memory, so each one's need is reserved until it has loaded.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catalog.errors import StartFailed
from pool.fleet.specs import InstanceSpec
from pool.preflight.nvml import GpuDevice, GpuUnavailable
from worker.free_memory import memory_free
from worker.settings import BLOCK_TOKENS, variable

GIB = 2**30
CUDA_CONTEXT_BYTES = GIB // 2
"""Bytes of an idle process on a GPU: driver, kernels, workspaces."""
ACTIVATIONS_SHARE = 0.05
"""Memory for steps, as a share of the weights."""
KV_SHARE = 0.1
"""Memory for KV, as a share of the weights, if the model's shape is not known."""
_WEIGHTS = (".safetensors", ".gguf", ".bin")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_LARGEST_TTL_S = 15.0


@dataclass(eq=False)
class Gpus:
    """The GPUs of this machine and their free memory. Without a GPU, instances for the CPU still
    run."""

    read: Callable[[], list[GpuDevice]]
    heartbeat_s: float
    now: Callable[[], float]
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    """How often a cached answer was fresh, and how often it was not."""
    _devices: list[GpuDevice] = field(default_factory=list, init=False)
    _read_at: float | None = field(default=None, init=False)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _reserved: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict, init=False)

    async def devices(self) -> list[GpuDevice]:
        """All GPUs; the data is at most one heartbeat old. Raises ``GpuUnavailable``."""
        async with self._reading:
            ttl_s = min(self.heartbeat_s, _LARGEST_TTL_S)
            if self._read_at is not None and self.now() - self._read_at < ttl_s:
                self.hits += 1
                return self._devices
            self.misses += 1
            # NVML blocks on the driver.
            self._devices = await asyncio.to_thread(self.read)
            self._read_at = self.now()
            return self._devices

    async def take(self, who: str, spec: InstanceSpec, model: Path) -> tuple[str, ...]:
        """Reserve the first group of the spec that has room for ``who``, until ``settle``.
        Raises ``StartFailed`` with the missing memory of each group."""
        if not spec.on_gpu:
            return ()
        need = need_bytes(spec, model)
        refusals = []
        for group in spec.groups:
            share = need if spec.vram_gib is not None else -(-need // len(group))
            reason = await self.refusal(who, group, share)
            if not reason:
                return group
            refusals.append(reason)
        raise StartFailed("; ".join(refusals))

    async def refusal(self, who: str, group: Sequence[str], share: int) -> str:
        """Why ``who`` cannot have ``share`` bytes on each GPU of ``group``. If it can, reserve them
        and return an empty string."""
        try:
            devices = await self.devices()
        except GpuUnavailable as error:
            return f"no GPU can be looked at: {error}"
        taken: list[str] = []
        others = [reserved for other, reserved in self._reserved.items() if other != who]
        for wanted in group:
            device = _called(wanted, devices)
            if device is None:
                there = ", ".join(d.index for d in devices) or "none"
                return f"there is no GPU {wanted}; available: {there}"
            free = device.free_bytes - sum(b for uuids, b in others if device.uuid in uuids)
            if share > free:
                return (
                    f"it needs {share / GIB:.1f} GiB on GPU {wanted}, where "
                    f"{max(free, 0) / GIB:.1f} GiB of {device.total_bytes / GIB:.1f} GiB are free;"
                    " set vram_gib if it needs less, or give it another GPU"
                )
            taken.append(device.uuid)
        self._reserved[who] = (tuple(taken), share)
        return ""

    def settle(self, who: str) -> None:
        """Drop the reservation of ``who`` after its load or failure; NVML now shows its memory."""
        if self._reserved.pop(who, None) is not None:
            self._read_at = None

    async def fits_beside(self, spec: InstanceSpec, model: Path) -> bool:
        """Whether an instance could start alongside all others. Reserves nothing."""
        if not spec.on_gpu:
            free = memory_free()
            return free is None or need_bytes(spec, model) < free
        who = f"{spec.name} next to"
        try:
            await self.take(who, spec, model)
        except StartFailed:
            return False
        self.settle(who)
        return True

    async def visible(self, group: Sequence[str]) -> str:
        """Value for ``CUDA_VISIBLE_DEVICES``: UUIDs, because CUDA may number GPUs differently."""
        devices = await self.devices()
        found = {wanted: _called(wanted, devices) for wanted in group}
        return ",".join(device.uuid if device else wanted for wanted, device in found.items())


def _called(wanted: str, devices: Sequence[GpuDevice]) -> GpuDevice | None:
    return next((device for device in devices if device.is_called(wanted)), None)


def need_bytes(spec: InstanceSpec, model: Path) -> int:
    """Bytes that a spec needs: its stated need (on each GPU), else a conservative estimate from the
    files of its checkpoint folder or .gguf file (on all GPUs). Made-up tokens need no weights.

    The KV cache is ``kv.blocks``, else one whole context; the worker uses more if memory is free.
    """
    if spec.vram_gib is not None:
        return int(spec.vram_gib * GIB)
    engine, dtype, blocks = (
        spec.settings.get(variable(name), "") for name in ("engine", "dtype", "kv.blocks")
    )
    if engine.startswith("synthetic"):
        return GIB // 4
    files = _files(model)
    on_disk = sum(file.stat().st_size for file in files)
    config = _config(model)
    stored = _BYTES.get(str(config.get("torch_dtype") or config.get("dtype")), 2)
    wanted = _BYTES.get(dtype, stored)
    is_gguf = any(file.suffix == ".gguf" for file in files)
    weights = on_disk if is_gguf else on_disk * wanted // stored
    kv = _kv_bytes(config, int(blocks) if blocks.isdigit() else 0, wanted)
    other = int(weights * ACTIVATIONS_SHARE) + (CUDA_CONTEXT_BYTES if spec.on_gpu else GIB // 4)
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
