"""Steps on CUDA: decodes replay graphs, and only masks wait between launch and collect.

All work is queued on one stream, so that a step reads what the previous step wrote: the pool's KV
and each slot's latest sample, which never needs to go through the host. After the step, its results
are copied to pinned memory, and an event after the copy marks its end. That event and one before
the step's first kernel give the step's time on the device's clock::

    stream   │── step n ──│ idle │── step n+1 ──│
                        done   begun          done         busy = done - begun

"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from worker.attention import PackedBatch
from worker.errors import DeviceLost
from worker.grammar.masks import Masks
from worker.log import model_log
from worker.models.model import Decoder
from worker.pinned import reserve, upload
from worker.runner.cuda_graphs import (
    CudaRecorder,
    DecodeGraphs,
    DeviceSlots,
    FixedDecodes,
    GraphRecorder,
    batch_sizes,
)
from worker.runner.device_probe import probe_of
from worker.runner.forward import BatchForward, Forward
from worker.runner.torch_runner import (
    SlotLimits,
    StepOutputs,
    TorchRunner,
    constrained_rows,
)
from worker.sampling.sampler import Sampled, Sampler
from worker.scheduler.plan import DeviceTime, Plan, Row, StepResult
from worker.scheduler.request import PENDING, Request


class Event(Protocol):
    """A CUDA event: a mark in the stream with the time at which the stream passes it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``; the stream has passed both."""


class CudaRunner(TorchRunner):
    """An ``OverlappingRunner``. On the CPU, for tests, it does the same without overlap."""

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        limits: SlotLimits,
        state: DeviceSlots,
        graphs: DecodeGraphs | None,
        *,
        device: torch.device,
    ) -> None:
        """Without ``graphs``, decodes are launched kernel by kernel, as steps with prompts are."""
        super().__init__(forward, sampler, limits, device=device)
        self._state: DeviceSlots | None = state
        self._graphs = graphs
        self._reads_table_on_device = _with_fixed_decodes(forward) is not None
        self._latest: LaunchedOnDevice | None = None
        self._cuda = device.type == "cuda"
        self._probe = probe_of(device)
        self._make_event = _timing_event if self._cuda else None
        """Makes an event; None on the CPU, where every call finishes before it returns."""
        self._waited_s = 0.0
        """Seconds that the step being launched has waited for the step before it."""

    def launch(self, plan: Plan) -> "LaunchedOnDevice":
        """See ``OverlappingRunner``. Raises ``DeviceLost`` if no step can succeed any more."""
        try:
            # The engine's thread may have a different current device than the loading thread.
            with torch.cuda.device(self._device) if self._cuda else nullcontext():
                return self._launch(plan)
        except Exception:
            self.settle()
            raise

    def execute(self, plan: Plan) -> StepResult:
        """See ``Runner``."""
        return self.launch(plan).collect()

    def close(self) -> None:
        """Drop model, pool and graphs. Idempotent."""
        with suppress(DeviceLost):  # a lost device touches no memory any more
            self.settle()
        self._graphs = None
        self._latest = None
        self._state = None
        super().close()

    def settle(self) -> None:
        """Wait until the device has finished all work. Raises ``DeviceLost``."""
        if self._probe is not None:
            self._probe.check()

    @torch.inference_mode()
    def _launch(self, plan: Plan) -> "LaunchedOnDevice":
        forward, state = self._forward, self._state
        if forward is None or state is None:
            raise RuntimeError("the runner is closed")
        begun = self._mark()
        self._waited_s = 0.0
        slots = self._table.slots_of(plan.rows, self._begin)
        all_decode = plan.decodes == len(plan.rows)
        if self._graphs is not None and all_decode and len(plan.rows) <= self._graphs.largest:
            sampled = self._decode(self._graphs, state, plan, slots)
            outputs = StepOutputs(len(plan.rows), range(len(plan.rows)), sampled)
        else:
            outputs = self._compute(forward, plan, slots, self._masks_of(plan))
            if outputs.sampled is not None:
                sampling = self._to_device(slots[outputs.sampling])
                state.take(sampling, outputs.sampled.ids)
        there = outputs.on_its_way()
        marks = None
        if begun is not None and (done := self._mark()) is not None:
            before = self._latest.marks if self._latest is not None else None
            marks = StepMarks(before.done if before else begun, begun, done, self._waited_s)
        self._latest = LaunchedOnDevice(self, plan.rows, there, marks)
        return self._latest

    def _mark(self) -> Event | None:
        if self._make_event is None:
            return None
        event = self._make_event()
        event.record()
        return event

    def _masks_of(self, plan: Plan) -> Callable[[], Masks] | None:
        """A function that makes the step's masks; None if no row needs one.

        A grammar must read a text's last token. If a constrained row's is still on the device, the
        function waits for the previous step. It is called once all before the step's masks is
        queued, so that the device computes meanwhile. Rows without masks are drawn after it too:
        the device waits for them only if the masks take longer than the forward pass.
        """
        masked = [row.request for row in plan.rows if row.samples and row.request.job.constraint]
        if not masked:
            return None
        before = self._latest if any(one.tokens[-1] == PENDING for one in masked) else None

        def make() -> Masks:
            began = time.monotonic()
            latest = {} if before is None else before.tokens()
            self._waited_s += time.monotonic() - began
            return self._masks.make(constrained_rows(plan.rows, latest))

        return make

    def _decode(
        self, graphs: DecodeGraphs, state: DeviceSlots, plan: Plan, slots: NDArray[np.int64]
    ) -> Sampled:
        count = len(plan.rows)
        positions = np.fromiter((row.start for row in plan.rows), np.int64, count)
        ids = np.fromiter((row.request.tokens[row.start] for row in plan.rows), np.int64, count)
        chances = self._sampler.plain_chances(slots, positions + 1)
        if chances is not None:
            drawing = chances if chances[0].any() else None
            return Sampled(graphs.replay(ids, positions, slots, drawing).chosen)
        replayed = graphs.replay(ids, positions, slots, None)
        sampled = self._sampler.sample(
            replayed.logits, slots, positions + 1, replayed.given_ids, self._masks_of(plan)
        )
        state.take(replayed.slots, sampled.ids)
        return sampled

    def _pack(
        self, plan: Plan, slots: NDArray[np.int64]
    ) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        batch, token_ids, positions = super()._pack(plan, slots)
        if plan.decodes and self._state is not None:
            head = token_ids[: plan.decodes]
            head.copy_(self._state.known(head, self._to_device(slots[: plan.decodes])))
        return batch, token_ids, positions

    def _block_table(
        self, slots: NDArray[np.int64], longest: int
    ) -> tuple[NDArray[np.int64], torch.Tensor | None]:
        if not self._reads_table_on_device or self._state is None:
            return super()._block_table(slots, longest)
        # A block table of a hundred long texts takes megabytes, and the device already has it.
        width = -(-longest // self._block_tokens)
        rows = self._state.blocks[:, :width].index_select(0, self._to_device(slots))
        return np.empty((len(slots), 0), np.int64), rows

    def _begin(self, slot: int, request: Request) -> None:
        super()._begin(slot, request)
        assert self._state is not None
        self._state.begin(slot, self._table.blocks[slot])


def build_cuda_runner(
    forward: Forward,
    sampler: Sampler,
    limits: SlotLimits,
    *,
    device: torch.device,
    dummy_block: int,
    recorder: GraphRecorder | None = None,
) -> CudaRunner:
    """Build the runner. If the attention backend allows it, record decodes.

    ``dummy_block`` is a block of the pool that no request ever gets. Raises ``MemoryError`` if the
    device has too little memory left for the recordings.
    """
    warm_up(forward, dummy_block, limits, device=device)
    sampler.compile_draws()
    state = DeviceSlots(limits.max_running, limits.max_blocks, dummy_block, device)
    graphs = None
    recordable = _with_fixed_decodes(forward)
    if recordable is not None:
        try:
            graphs = DecodeGraphs(
                *recordable,
                state,
                recorder or CudaRecorder(),
                sizes=batch_sizes(limits.max_running),
                block_tokens=limits.block_tokens,
                vocab_size=sampler.vocab_size,
            )
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{device} has too little memory left to record decodes of up to"
                f" {limits.max_running} rows; lower TIDEGATE_WORKER__KV__BLOCKS or"
                " TIDEGATE_WORKER__MAX_RUNNING"
            ) from error
    else:
        model_log.info("decodes run without CUDA graphs: this attention backend cannot be recorded")
    return CudaRunner(forward, sampler, limits, state, graphs, device=device)


@torch.inference_mode()
def warm_up(
    forward: Forward, dummy_block: int, limits: SlotLimits, *, device: torch.device
) -> None:
    """Run all parts of steps once, on the dummy block, so that everything is compiled (LB-6).

    Runs decodes and a prompt chunk, each with few keys and with the maximum: the kernel differs if
    a text's keys are split.
    """
    block_tokens = limits.block_tokens
    most = block_tokens * limits.max_blocks
    for new, keys in ((1, 1), (1, most), (block_tokens, block_tokens), (block_tokens, most)):
        positions = np.arange(keys - new, keys)
        batch = PackedBatch(
            decodes=int(new == 1),
            query_tokens=np.array([new]),
            context_tokens=np.array([keys]),
            block_table=np.full((1, limits.max_blocks), dummy_block),
            slots=dummy_block * block_tokens + positions % block_tokens,
        )
        ids = upload(np.zeros(new, np.int64), device)
        forward.logits(forward.hidden(batch, ids, upload(positions, device)))
    if device.type == "cuda":
        reserve()
        torch.cuda.synchronize(device)


class StepMarks(NamedTuple):
    """A step's events, and how long its launch waited for the step ``before``."""

    before: Event
    begun: Event
    done: Event
    waited_s: float

    def time(self) -> DeviceTime:
        """The step's time; the step must have finished."""
        busy_s = self.begun.elapsed_time(self.done) / 1e3
        idle_s = self.before.elapsed_time(self.begun) / 1e3
        return DeviceTime(busy_s, max(0.0, idle_s), self.waited_s)


class LaunchedOnDevice:
    """A ``LaunchedStep`` whose results are on the host once its last event has passed."""

    def __init__(
        self, runner: CudaRunner, rows: Sequence[Row], outputs: StepOutputs, marks: StepMarks | None
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._outputs = outputs
        self.marks = marks

    def tokens(self) -> dict[Request, int]:
        """Wait for the drawn tokens; the step must still be collected. A non-finite row gets an
        arbitrary token, because nothing after it is ever published."""
        self._wait()
        if self._outputs.sampled is None:
            return {}
        ids = self._outputs.sampled.ids.tolist()
        sampled = zip(self._outputs.sampling, ids, strict=True)
        return {self._rows[i].request: max(0, id_) for i, id_ in sampled}

    def collect(self) -> StepResult:
        """See ``LaunchedStep``. Raises ``DeviceLost`` if no step can succeed any more."""
        try:
            self._wait()
            result = self._outputs.read()
            result.device = None if self.marks is None else self.marks.time()
            return result
        except Exception:
            self._runner.settle()
            raise

    def _wait(self) -> None:
        if self.marks is not None:
            self.marks.done.synchronize()


def _with_fixed_decodes(forward: Forward) -> tuple[Decoder, FixedDecodes] | None:
    """The model and attention of ``forward`` if its decodes can be recorded, otherwise None."""
    if isinstance(forward, BatchForward) and isinstance(forward.attention, FixedDecodes):
        return forward.model, forward.attention
    return None


def _timing_event() -> Event:
    # Blocking: the engine's thread sleeps instead of spinning on a core that others need.
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    return cast(Event, event)
