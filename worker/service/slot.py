"""Triton's side of the slot pipeline: requests in, progress and clips out.

Everything runs on one thread with an event loop, which alone touches responders; stages and the
encoder have threads of their own. A clip's buffers are given back when its last answer was sent,
or when its work has come to an end some other way, whatever that was.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from worker.errors import MemoryLimitExceeded, RequestError, ResponderLost
from worker.media import encode
from worker.media.budgets import Stage
from worker.media.buffers import BufferPool, BufferSizes
from worker.media.errors import OutOfTime, SlotError
from worker.media.memory import MemoryGuard, ResidencyPlan, Resident, media_log
from worker.media.pipeline import (
    Clip,
    PipelineConfig,
    SlotPipeline,
    Unfinished,
    nominal_times,
)
from worker.media.plan import SAMPLE_RATE
from worker.media.queue import QueueFull, SlotQueue
from worker.media.settings import SlotSettings
from worker.media.stages.providers import load_stages
from worker.protocol import Code
from worker.runner.device import open_device
from worker.service.call import Call, Responder, Tensors, strings
from worker.service.slot_request import SlotRequest, parse_slot

_POLL_S = 0.05
"""How often a slot's client is looked after."""
_PROGRESS_S = 0.1
_GB = 1_000_000_000

log = logging.getLogger("tidegate.worker.slot")


def build_slots(settings: SlotSettings) -> "SlotWorker":
    """Load providers and take the buffers. Raises ``LoadError``, ``MemoryLimitExceeded``."""
    began = time.monotonic()
    device = open_device(settings.device)
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
    encode.check_encoder()
    stages = load_stages(
        device,
        speech=settings.speech,
        portrait=settings.portrait,
        video=settings.video,
        check=settings.check,
    )
    sizes = BufferSizes(
        settings.size, int(settings.seconds * 30) + 1, math.ceil(settings.seconds * SAMPLE_RATE)
    )
    plan = ResidencyPlan(
        [
            *(resident for provider in stages.all() for resident in provider.residents()),
            Resident(f"buffers of {settings.slots} slots", settings.slots * sizes.bytes),
        ],
        workspace_bytes=0,
    )
    for line in plan.lines():
        media_log.info("%s", line)
    used: Callable[[], int] = (
        (lambda: torch.cuda.memory_allocated(device))
        if device.type == "cuda"
        else (lambda: plan.bytes)
    )
    guard = MemoryGuard(
        used, round(settings.memory_soft_gb * _GB), round(settings.memory_hard_gb * _GB)
    )
    guard.check("the residency plan", plan.bytes - used())
    config = PipelineConfig(settings.size, settings.seconds, settings.buffer_s)
    pipeline = SlotPipeline(stages, nominal_times(), guard, device, config)
    media_log.info("the slot pipeline is loaded in %.2f s", time.monotonic() - began)
    return SlotWorker(pipeline, BufferPool(sizes, settings.slots, device), settings)


class SlotWorker:
    """``accept`` and ``refuse`` are called by Triton's thread; everything else is the loop's."""

    def __init__(self, pipeline: SlotPipeline, pool: BufferPool, settings: SlotSettings) -> None:
        self._pipeline = pipeline
        self._pool = pool
        self._queue = SlotQueue(pool, settings.max_waiting)
        self._settings = settings
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="slot encoder")
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slot loop")

    def start(self) -> None:
        """Take requests from now on."""
        self._thread.start()

    def accept(self, call: Call) -> None:
        """Render what it asks for."""
        received = time.monotonic()
        self._loop.call_soon_threadsafe(self._begin, call, received)

    def refuse(self, responder: Responder, message: str) -> None:
        """Answer a request that could not even be read."""
        self._loop.call_soon_threadsafe(responder.fail, Code.INVALID_REQUEST, message)

    def close(self) -> None:
        """End what runs, then threads and models."""
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pipeline.close()
        self._encoder.shutdown()
        self._pool.clear_buffers()

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, call: Call, received: float) -> None:
        task = self._loop.create_task(self._serve(call, received))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, call: Call, received: float) -> None:
        """Answers ``call`` exactly once, whatever happens."""
        responder = call.responder
        code, message = Code.CANCELLED, "the worker is stopping"
        watch = self._loop.create_task(self._watch(responder, asyncio.current_task()))
        try:
            await self._render(call, received)
            return
        except asyncio.CancelledError:
            if watch.done():
                code, message = Code.CANCELLED, "cancelled"
        except ResponderLost:
            return
        except (RequestError, SlotError) as error:
            code, message = error.code, str(error)
        except QueueFull as error:
            code, message = Code.NO_CAPACITY, str(error)
        except MemoryLimitExceeded as error:
            code, message = Code.NO_CAPACITY, str(error)
        except Exception:
            log.exception("a slot failed")
            code, message = Code.INTERNAL, "the slot pipeline failed; its log says why"
        finally:
            watch.cancel()
        responder.fail(code, message)

    async def _watch(self, responder: Responder, slot: "asyncio.Task[None] | None") -> None:
        """Cancel a slot whose client gave up or is gone."""
        while not responder.is_cancelled():  # noqa: ASYNC110 (Triton tells nobody of it)
            await asyncio.sleep(_POLL_S)
        if slot is not None:
            slot.cancel()

    async def _render(self, call: Call, received: float) -> None:
        request = parse_slot(call, self._settings.default_deadline_s)
        deadline_at = received + request.deadline_s
        left_s = deadline_at - time.monotonic()
        plan = self._pipeline.plan(request.recipe, left_s, degrade=request.degrade)
        takes_s = self._pipeline.predicted_s(plan)
        start_by = deadline_at - self._settings.buffer_s - takes_s
        least_s = self._pipeline.least_s(request.recipe) if request.degrade else takes_s
        give_up_at = start_by + takes_s - least_s
        now = time.monotonic()
        if now + self._queue.wait_s(start_by, takes_s) > give_up_at and self._queue.waiting:
            raise OutOfTime("queue", f"{self._queue.waiting} slots wait, and its turn is too late")
        lease = await self._queue.acquire(start_by, takes_s, give_up_at)
        try:
            # What there was time for when it came may have gone by in the queue.
            left_s = deadline_at - time.monotonic()
            plan = self._pipeline.plan(request.recipe, left_s, degrade=request.degrade)
            said = _Said(self._loop, call.responder)
            reason = None
            try:
                clip = await self._pipeline.run(
                    request.recipe, plan, lease, deadline_at, said, degrade=request.degrade
                )
            except Unfinished as unfinished:
                clip, reason = unfinished.clip, unfinished.reason
            await self._answer(request, call.responder, clip, deadline_at, reason)
        finally:
            self._queue.release(lease)

    async def _answer(
        self,
        request: SlotRequest,
        responder: Responder,
        clip: Clip,
        deadline_at: float,
        reason: Exception | None,
    ) -> None:
        """The last answer: the clip, or the error behind what there is of it."""
        tensors: Tensors = {}
        if reason is None or isinstance(reason, OutOfTime):
            encoding = self._loop.run_in_executor(self._encoder, _outputs, request.outputs, clip)
            try:
                tensors = await asyncio.shield(encoding)
            except asyncio.CancelledError:
                await asyncio.wait([encoding])  # it reads buffers that are about to be lent again
                raise
        is_met = reason is None and time.monotonic() <= deadline_at
        event = {"event": "result" if reason is None else "saved", **_facts(clip, is_met=is_met)}
        answer = {"event": strings(msgspec.json.encode(event)), **tensors}
        if reason is None:
            responder.send(answer, final=True)
            return
        if isinstance(reason, OutOfTime):
            responder.send(answer)
        raise reason


class _Said:
    """Progress of one slot, from its stages' threads to its client, not more often than useful."""

    def __init__(self, loop: asyncio.AbstractEventLoop, responder: Responder) -> None:
        self._loop = loop
        self._responder = responder
        self._next: dict[Stage, float] = {}

    def __call__(self, stage: Stage, done: float) -> None:
        now = time.monotonic()
        if done < 1.0 and now < self._next.get(stage, 0.0):
            return
        self._next[stage] = now + _PROGRESS_S
        self._loop.call_soon_threadsafe(self._send, stage, done)

    def _send(self, stage: Stage, done: float) -> None:
        event = {"event": "stage", "stage": stage, "percent": round(100 * done)}
        with suppress(ResponderLost):  # whoever watches it ends the slot
            self._responder.send({"event": strings(msgspec.json.encode(event))})


def _facts(clip: Clip, *, is_met: bool) -> dict[str, object]:
    plan = clip.plan
    return {
        "seconds": round(clip.samples / SAMPLE_RATE, 3),
        "frames": clip.frames,
        "fps": plan.fps,
        "size": plan.size,
        "given_up": plan.given_up,
        "check": clip.check,
        "deadline_met": is_met,
        **{f"{stage}_ms": round(clip.stage_ms.get(stage, 0.0), 1) for stage in Stage},
        "total_ms": round(clip.total_ms, 1),
    }


def _outputs(names: tuple[str, ...], clip: Clip) -> Tensors:
    """What of ``names`` there is."""
    made: dict[str, NDArray[Any]] = {}
    if clip.frames and "mp4" in names:
        made["mp4"] = np.frombuffer(encode.mp4(clip.video, clip.audio, clip.plan.fps), np.uint8)
    if clip.frames and "video" in names:
        made["video"] = clip.video.cpu().numpy()
    if clip.samples and "wav" in names:
        made["wav"] = np.frombuffer(encode.wav(clip.audio), np.uint8)
    if clip.samples and "audio" in names:
        made["audio"] = clip.audio.cpu().numpy()
    if clip.portrait_size and "png" in names:
        made["png"] = np.frombuffer(encode.png(clip.portrait), np.uint8)
    if clip.portrait_size and "actor" in names:
        made["actor"] = clip.portrait.cpu().numpy()
    return made
