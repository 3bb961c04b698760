"""Builds the clip worker from settings: loads providers, allocates buffers, logs the memory plan.

A text model may share the GPU. Triton runs each model in its own process, and the GPU switches
between the processes. A cap on each process's allocator divides the memory.
"""

import asyncio
import math
import time

import torch

from clips.plan.budgets import BUDGETS, Activity, StageTimes
from clips.plan.plan import NOMINAL, SAMPLE_RATE
from clips.plan.recipe import Portrait, Recipe, Video
from clips.render import encode
from clips.render.buffers import BufferPool, BufferSizes
from clips.render.clip import ClipOrder, Unfinished
from clips.render.errors import ClipError
from clips.render.memory import (
    CountedMemory,
    Resident,
    clip_guard,
    clips_within,
    media_log,
    residency_plan,
)
from clips.render.pipeline import ClipPipeline
from clips.render.settings import RenderSettings
from clips.render.stages.providers import load_providers
from clips.render.worker import ClipWorker
from worker.errors import RequestError
from worker.memory import LimitedMemory, MemoryLimits
from worker.runner.device import open_device
from worker.runner.device_probe import probe_of
from worker.runner.memory import CudaMemory

_PROBE_S = 30.0
"""Seconds without an answer after which a device counts as lost; other stages may have queued
seconds of work on it."""


def build_clips(settings: RenderSettings) -> ClipWorker:
    """Build the clip worker. Raises ``LoadError``, ``MemoryLimitExceeded``, ``ValueError``."""
    began = time.monotonic()
    device = open_device(settings.device)
    limits = MemoryLimits.of(settings.memory.hard_gib)
    cap_memory(device, limits.hard_bytes)
    encode.check_encoder()
    providers = load_providers(device, settings)
    sizes = BufferSizes(
        settings.size, int(settings.seconds * 30) + 1, math.ceil(settings.seconds * SAMPLE_RATE)
    )
    loaded = providers.by_stage().values()
    models = [resident for provider in loaded for resident in provider.residents()]
    models_bytes = sum(each.bytes for each in models)
    slots = clips_within(settings.slots, models_bytes, sizes.bytes, limits.hard_bytes)
    buffers = Resident(f"buffers of {slots} slots", slots * sizes.bytes)
    for line in residency_plan([*models, buffers]):
        media_log.info("%s", line)
    planned_bytes = models_bytes + buffers.bytes
    meter: LimitedMemory = CountedMemory(lambda: planned_bytes)
    if device.type == "cuda":
        meter = CudaMemory(device.index or 0)
    guard = clip_guard(meter, limits)
    guard.check(planned_bytes - meter.used_bytes(), "the residency plan")
    probe = probe_of(device, _PROBE_S)
    check_device = None if probe is None else probe.check
    activity = Activity()
    times = {
        stage: StageTimes(BUDGETS[stage], units, activity) for stage, units in NOMINAL.units.items()
    }
    pipeline = ClipPipeline(providers, times, guard, device, settings, check_device)
    media_log.info("the slot pipeline is loaded in %.2f s", time.monotonic() - began)
    pool = BufferPool(sizes, slots, device)
    asyncio.run(warm_up(pipeline, pool))
    return ClipWorker(pipeline, pool)


def cap_memory(device: torch.device, hard_bytes: int) -> None:
    """Make torch refuse to allocate more than ``hard_bytes`` of a GPU, even between two checks of
    the limit; 0: no cap."""
    if device.type != "cuda" or not hard_bytes:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, hard_bytes / total), device)


_TEXT = "Good morning."
_ENOUGH_S = 10.0
"""Seconds after which no more warm-up clips start: SL-1 allows a cold start 30 s."""
_DEADLINE_S = 60.0


async def warm_up(pipeline: ClipPipeline, pool: BufferPool) -> None:
    """Render a short clip, twice if time allows, because the first includes one-time costs. Does
    not raise if a provider fails; its requests will raise.
    """
    began = time.monotonic()
    recipe = Recipe("1.1", _TEXT, portrait=Portrait(seed=1), video=Video(seconds=1.0))
    for _ in range(2):
        if time.monotonic() - began >= _ENOUGH_S:
            break
        lease = pool.lease()
        assert lease is not None, "nothing else runs yet"
        order = ClipOrder(recipe, time.monotonic() + _DEADLINE_S)
        with lease:
            try:
                await pipeline.run(order, pipeline.whole(recipe), lease, lambda stage, done: None)
            except (Unfinished, ClipError, RequestError) as error:
                media_log.warning("the warm-up did not finish: %s", error)
    for times in pipeline.times.values():
        times.end_warm_up()
    media_log.info("warmed up in %.2f s", time.monotonic() - began)
