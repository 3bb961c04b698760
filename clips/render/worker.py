"""Triton's side of the clip pipeline: requests in, progress and clips out.

Everything runs on one thread with an event loop, which alone touches responders; stages and the
encoder have threads of their own. A clip's buffers are given back when its last answer was sent, or
when its work has ended in any other way.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec
from numpy.typing import NDArray

from clips.plan.budgets import ClipStage
from clips.plan.plan import ClipPlan
from clips.plan.recipe import read_recipe
from clips.render.buffers import BufferPool, Lease
from clips.render.clip import Clip, ClipOrder, Unfinished
from clips.render.encode import outputs_of
from clips.render.errors import ClipCancelled, ClipError, OutOfTime, StageFailed
from clips.render.pipeline import HOPED, LEAST, ClipPipeline, Progress
from clips.render.queue import ClipQueue, ClipQueueFull
from clips.render.reporter import AbortTimes, state_of
from clips.render.stage_runner import NICE, ended
from clips.state import STATE_EVERY_S
from protocol import Code
from worker.errors import DeviceLost, InvalidCall, MemoryLimitExceeded, RequestError, ResponderLost
from worker.priority import lower_priority
from worker.service.call import Call, Responder, strings

RECIPE: Final = "recipe"
OUTPUTS: Final = ("mp4", "wav", "png", "video", "audio", "actor")
"""Outputs of a result: files, and the tensors behind them."""


class _Parameters(msgspec.Struct, forbid_unknown_fields=True):
    deadline_ms: float = 45_000.0
    """From receipt; the default is SL-1's."""
    on_deadline: Literal["error", "degrade"] = "error"
    outputs: str = "mp4"
    """Names of ``OUTPUTS``, separated by commas."""
    keep_on: bool = False
    """Whether only its deadline stops it, even if it is certain to be late; its result then says
    ``spared``. Used for a sample, to see how often an early end is wrong (DL-17)."""
    watch: bool = False
    """Whether to send the model's state regularly instead of a clip (``clips.state``)."""


def parse_clip(call: Call, received: float) -> ClipOrder | None:
    """Parse a request of the time ``received``; None if it only watches. Raises ``InvalidCall`` and
    ``RecipeError``."""
    data = call.data(RECIPE)
    if data is None:
        raise InvalidCall(f"input {RECIPE} is missing")
    try:
        stated = msgspec.convert(dict(call.parameters), _Parameters, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidCall(f"parameters: {error}") from None
    if stated.watch:
        return None
    if not 0 < stated.deadline_ms < math.inf:
        raise InvalidCall("deadline_ms must be a positive number of milliseconds")
    outputs = tuple(filter(None, (name.strip() for name in stated.outputs.split(","))))
    for name in outputs:
        if name not in OUTPUTS:
            raise InvalidCall(f"outputs: there is no {name!r}; there is {', '.join(OUTPUTS)}")
    return ClipOrder(
        read_recipe(data),
        received + stated.deadline_ms / 1000,
        stated.on_deadline == "degrade",
        stated.keep_on,
        outputs,
    )


_PROGRESS_S = 0.1
"""Minimum seconds between two reports of a stage's progress."""
_POLL_S = 0.05
"""Seconds between checks whether a clip's client is gone."""
LAST_WORDS_S = 0.5
"""Seconds that answers have to leave through Triton before the process ends."""
_LARGE = 2**20
"""Bytes of an answer from which copying it would delay other clips' clients."""

log = logging.getLogger("tidegate.worker.slot")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Asked:
    """One request, until it is answered. Times are on ``time.monotonic``."""

    call: Call
    received: float
    cancelled_at: float | None = None
    is_sending: bool = False
    """Whether another thread is using its responder."""
    spared: bool = False
    """Whether it was certain to be late on arrival and continues."""
    stopped: tuple[str, float] | None = None
    """The limit that stopped it, and when; None while none has."""

    @property
    def responder(self) -> Responder:
        return self.call.responder


class ClipWorker:
    """The slot model's service. ``accept`` and ``refuse`` are for Triton's thread."""

    def __init__(
        self,
        pipeline: ClipPipeline,
        pool: BufferPool,
        die: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        """``die`` ends the process, because none of its parts can use the device again."""
        self._die = die
        self._has_lost_device = False
        self._pipeline = pipeline
        self._pool = pool
        self._queue = ClipQueue(pool)
        self._aborts = AbortTimes()
        self._encoder = ThreadPoolExecutor(
            1, "slot encoder", initializer=lower_priority, initargs=(NICE,)
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slot loop")

    def start(self) -> None:
        """Start the loop: requests may come from now on."""
        self._thread.start()

    def accept(self, call: Call) -> None:
        asked = _Asked(call, time.monotonic())
        self._loop.call_soon_threadsafe(self._begin, asked)

    def refuse(self, responder: Responder, message: str) -> None:
        """Answer a request that could not be read."""
        self._loop.call_soon_threadsafe(responder.fail, Code.INVALID_REQUEST, message)

    def close(self) -> None:
        """End running clips, then threads and models."""
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

    def _begin(self, asked: _Asked) -> None:
        if self._has_lost_device:
            asked.responder.fail(Code.DRAINING, "the worker has lost its device and ends")
            return
        task = self._loop.create_task(self._serve(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, asked: _Asked) -> None:
        """Serve a request, and answer it exactly once, whatever happens."""
        code, message = Code.CANCELLED, "the worker is stopping"
        watch = self._loop.create_task(self._watch(asked, asyncio.current_task()))
        try:
            order = parse_clip(asked.call, asked.received)
            if order is None:
                await self._report(asked.responder)
            else:
                await self._render(asked, order)
            return
        except asyncio.CancelledError:
            if asked.cancelled_at is not None:
                code, message = Code.CANCELLED, "cancelled"
        except ResponderLost:
            return
        except (RequestError, ClipError) as error:
            code, message = error.code, str(error)
        except (ClipQueueFull, MemoryLimitExceeded) as error:
            code, message = Code.NO_CAPACITY, str(error)
        except DeviceLost as error:
            log.critical("%s: ending the process; its supervisor starts it again", error)
            code, message = Code.INSTANCE_LOST, "the device was lost while it worked on this"
            self._end_process()
        except Exception:
            log.exception("a slot failed")
            code, message = Code.INTERNAL, "the slot pipeline failed; its log says why"
        finally:
            watch.cancel()
        asked.responder.fail(code, message)

    def _end_process(self) -> None:
        """End the process once all running clips are answered."""
        if self._has_lost_device:
            return
        self._has_lost_device = True
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self._loop.call_later(LAST_WORDS_S, self._die)

    async def _watch(self, asked: _Asked, clip: "asyncio.Task[None] | None") -> None:
        """Cancel a clip after its client cancelled or left."""
        # Triton sends no notification of it.
        while asked.is_sending or not asked.responder.is_cancelled():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        asked.cancelled_at = time.monotonic()
        if clip is not None:
            clip.cancel()

    async def _report(self, responder: Responder) -> None:
        """Send the model's state regularly, while anyone listens."""
        while True:
            state = state_of(self._pipeline, self._pool, self._queue, self._aborts)
            responder.send(_answer_of("state", msgspec.structs.asdict(state)))
            await asyncio.sleep(STATE_EVERY_S)

    async def _render(self, asked: _Asked, order: ClipOrder) -> None:
        queue, prediction = self._queue, self._pipeline.prediction
        takes_s = prediction.all_s(self._plan(asked, order), HOPED)
        start_by = order.deadline_at - prediction.buffer_s - takes_s
        give_up_at = order.deadline_at
        if not order.keep_on:
            # Without observations it may be fast: it waits as long as that could help.
            least_s = prediction.all_s(self._pipeline.least(order), LEAST)
            give_up_at -= prediction.buffer_s + least_s
        now = time.monotonic()
        if now + queue.wait_s(start_by, takes_s) > give_up_at and queue.waiting:
            raise OutOfTime("queue", f"{queue.waiting} slots wait, and its turn is too late")
        lease = await queue.acquire(start_by, takes_s, give_up_at)
        try:
            await self._render_into(lease, asked, order)
        finally:
            queue.release(lease)
            if asked.cancelled_at is not None:
                asked.stopped = "cancelled", asked.cancelled_at
            if asked.stopped is not None:
                cause, since = asked.stopped
                self._aborts.observe(cause, time.monotonic() - since)

    async def _render_into(self, lease: Lease, asked: _Asked, order: ClipOrder) -> None:
        # There may be less time now, after the queue.
        plan = self._plan(asked, order)
        reason = None
        try:
            clip = await self._pipeline.run(order, plan, lease, self._progress_of(asked))
        except Unfinished as unfinished:
            clip, reason = unfinished.clip, unfinished.reason
            if isinstance(reason, ClipError) and reason.since is not None:
                asked.stopped = reason.limit, reason.since
            if isinstance(reason, StageFailed):  # it may have left anything in the buffers
                await self._in_encoder(lease.clear)
        if reason is None or isinstance(reason, OutOfTime):
            await self._answer(asked, order, clip, is_whole=reason is None)
        if reason is not None:
            raise reason

    def _progress_of(self, asked: _Asked) -> Progress:
        """Sends a clip's progress from its stages' threads to its client, at a limited rate."""
        next_at: dict[ClipStage, float] = {}

        def send(stage: ClipStage, done: float) -> None:
            with suppress(ResponderLost):  # its watcher ends the clip
                percent = round(100 * done)
                asked.responder.send(_answer_of("stage", {"stage": stage, "percent": percent}))

        def said(stage: ClipStage, done: float) -> None:
            now = time.monotonic()
            if done >= 1.0 or now >= next_at.get(stage, 0.0):
                next_at[stage] = now + _PROGRESS_S
                self._loop.call_soon_threadsafe(send, stage, done)

        return said

    def _plan(self, asked: _Asked, order: ClipOrder) -> ClipPlan:
        """What to begin of a request. Raises ``OutOfTime``, unless it is to keep on."""
        try:
            return self._pipeline.plan(order)
        except OutOfTime:
            if not order.keep_on:
                raise
            asked.spared = True
            return self._pipeline.least(order)

    async def _answer(self, asked: _Asked, order: ClipOrder, clip: Clip, *, is_whole: bool) -> None:
        """Send the clip, or what there is of it."""
        halted = threading.Event()

        def go_on() -> None:
            if halted.is_set():
                raise ClipCancelled("encoder", "stopped")

        made = await self._in_encoder(lambda: outputs_of(order.outputs, clip, go_on), halted)
        facts = clip.facts(is_met=is_whole and order.left_s >= 0)
        if asked.spared or clip.spared:
            facts["spared"] = True
        facts["copied_bytes"] = made.copied_bytes
        answer = _answer_of("result" if is_whole else "saved", facts) | made.tensors
        if made.copied_bytes < _LARGE:
            asked.responder.send(answer, final=is_whole)
            return
        asked.is_sending = True  # off the loop, since Triton copies it before it returns
        try:
            await self._in_encoder(lambda: asked.responder.send(answer, final=is_whole))
        finally:
            asked.is_sending = False

    async def _in_encoder(self, work: Callable[[], T], halted: threading.Event | None = None) -> T:
        """Run ``work`` on the encoder's thread. A cancellation sets ``halted`` for it."""
        submitted = self._encoder.submit(work)

        def halt() -> None:
            if halted is not None:
                halted.set()
                submitted.cancel()  # another's may be long

        return await ended(asyncio.wrap_future(submitted), halt)


def _answer_of(event: str, facts: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    return {"event": strings(msgspec.json.encode({"event": event, **facts}))}
