"""Builds the slot worker from settings: loads providers, takes buffers, logs the plan of both."""

import asyncio
import math
import time

from clips.plan.plan import SAMPLE_RATE
from clips.render import encode
from clips.render.buffers import BufferPool, BufferSizes
from clips.render.memory import (
    CountedMemory,
    ResidencyPlan,
    Resident,
    clip_guard,
    clips_within,
    media_log,
)
from clips.render.pipeline import ClipPipeline, PipelineConfig, nominal_times
from clips.render.reporter import ClipReporter
from clips.render.settings import RenderSettings
from clips.render.sharing import cap_memory
from clips.render.stage_runner import NICE
from clips.render.stages.providers import load_providers
from clips.render.warm_up import warm_up
from clips.render.worker import ClipWorker
from worker.memory import LimitedMemory, MemoryLimits
from worker.runner.device import open_device
from worker.runner.device_probe import probe_of
from worker.runner.memory import CudaMemory

_PROBE_S = 30.0
"""Seconds after which a device that has not answered counts as lost: other stages may have queued
seconds of work on it."""


def build_clips(settings: RenderSettings) -> ClipWorker:
    """Build the slot worker. Raises ``LoadError``, ``MemoryLimitExceeded``, ``ValueError``."""
    began = time.monotonic()
    device = open_device(settings.device)
    limits = MemoryLimits.of(settings.memory.hard_gib)
    cap_memory(device, limits.hard_bytes)
    encode.check_encoder()
    providers = load_providers(
        device,
        speech=settings.speech,
        portrait=settings.portrait,
        video=settings.video,
        check=settings.check,
        options=settings.models,
    )
    sizes = BufferSizes(
        settings.size, int(settings.seconds * 30) + 1, math.ceil(settings.seconds * SAMPLE_RATE)
    )
    models = [resident for provider in providers.all() for resident in provider.residents()]
    models_bytes = sum(each.bytes for each in models)
    slots = clips_within(settings.slots, models_bytes, sizes.bytes, limits.hard_bytes)
    buffers = Resident(f"buffers of {slots} slots", slots * sizes.bytes)
    plan = ResidencyPlan([*models, buffers], workspace_bytes=0)
    for line in plan.lines():
        media_log.info("%s", line)
    meter: LimitedMemory = CountedMemory(lambda: plan.bytes)
    if device.type == "cuda":
        meter = CudaMemory(device.index or 0)
    guard = clip_guard(meter, limits)
    guard.check(plan.bytes - meter.used_bytes(), "the residency plan")
    config = PipelineConfig(settings.size, settings.seconds, settings.buffer_s, NICE)
    probe = probe_of(device, _PROBE_S)
    check_device = None if probe is None else probe.check
    pipeline = ClipPipeline(providers, nominal_times(), guard, device, config, check_device)
    media_log.info("the slot pipeline is loaded in %.2f s", time.monotonic() - began)
    pool = BufferPool(sizes, slots, device)
    asyncio.run(warm_up(pipeline, pool))
    reporter = ClipReporter(settings, pipeline.times, guard, plan.residents)
    return ClipWorker(pipeline, pool, settings, reporter)
