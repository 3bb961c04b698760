"""Decodes with a few fixed batch sizes, each recorded once and then replayed as a whole.

A decode of a large model runs a few hundred short kernels, which take longer to launch one by one
than to run. A replay launches all of them at once, but on the same memory each time: it reads a
step's inputs from fixed tensors, and a smaller step's unused rows work on a dummy page. The
recording includes each row's likeliest token. Draws are a separate recording after it, so that a
greedy step does not pay for them::

    inputs [rows, 3]   token id, or PENDING for the row's last sample | position | slot
    chances [5, rows]  see ``Sampler.plain_chances``
    blocks [slots + 1, blocks of a text]     block table by slot; the last row is all dummy page
    last_ids [slots + 1]                     latest sample by slot
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention import AttentionBackend, AttentionStep
from worker.log import model_log
from worker.models.model import Decoder
from worker.pinned import upload, upload_to
from worker.sampling.sampler import draw_plain, likeliest

_STRIDE: Final = 8
"""Distance between batch sizes from 8 up: padding then costs less than a sixth."""


@runtime_checkable
class FixedDecodes(AttentionBackend, Protocol):
    """A backend whose decodes read their batch from refilled tensors and a block table on the
    device."""

    def decode_step(
        self, slots: Tensor, table: Tensor, contexts: Tensor, most_keys: int
    ) -> AttentionStep:
        """See ``TritonAttention.decode_step``."""


Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class GraphRecording:
    """A recorded call: ``replay`` runs it again and writes its results to ``results`` again."""

    replay: Callable[[], object]
    results: tuple[Tensor, ...]


class GraphRecorder(Protocol):
    """Records calls. A call may read only tensors whose memory does not move."""

    def record(self, call: Step) -> GraphRecording: ...


class CudaRecorder:
    """Records into CUDA graphs that share scratch memory, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: cuBLAS keeps a workspace for each stream that it has ever used.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, call: Step) -> GraphRecording:
        # Call once outside: a capture must not compile, tune or make permanent allocations.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            call()
        torch.cuda.current_stream().wait_stream(self._side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Captures only this thread's work: other threads may use the device.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            results = call()
        return GraphRecording(graph.replay, results)


class DeviceSlots:
    """State of each slot on the device; see the module docstring's diagram."""

    def __init__(self, slots: int, max_blocks: int, dummy_block: int, device: torch.device) -> None:
        shape = slots + 1, max_blocks
        self.blocks = torch.full(shape, dummy_block, dtype=torch.int32, device=device)
        self.last_ids = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.dummy_slot = slots
        self.device = device

    def begin(self, slot: int, blocks: NDArray[np.int64]) -> None:
        """Record that ``slot`` has a text in ``blocks`` [max_blocks] from now on."""
        upload_to(self.blocks[slot], blocks.astype(np.int32))

    def known(self, ids: Tensor, slots: Tensor) -> Tensor:
        """``ids`` with each PENDING id replaced by its slot's latest sample."""
        return torch.where(ids < 0, self.last_ids[slots], ids)

    def take(self, slots: Tensor, ids: Tensor) -> None:
        """Record ``ids`` as the latest samples of ``slots``; ``NO_TOKEN`` becomes token 0."""
        self.last_ids.index_copy_(0, slots, ids.clamp(min=0))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recordings for one batch size. ``step`` holds tensors that they read."""

    size: int
    step: AttentionStep
    decode: GraphRecording
    """Returns the likeliest next tokens and the ids of the computed tokens."""
    draw: GraphRecording
    """Returns the drawn token ids."""


class Replayed(NamedTuple):
    """Results on the device, valid until the next replay is queued."""

    logits: Tensor
    """[rows, vocabulary] float32."""
    given_ids: Tensor
    """[rows]: the token ids that the step computed."""
    slots: Tensor
    chosen: Tensor
    """Token ids [rows], perhaps ``NO_TOKEN``."""


def batch_sizes(most: int) -> list[int]:
    """Batch sizes to record for up to ``most`` rows."""
    sizes = {size for size in (1, 2, 4) if size <= most}
    return sorted(sizes | set(range(_STRIDE, most + 1, _STRIDE)) | {most})


class DecodeGraphs:
    """Recorded decodes. The constructor records them in some seconds on a GPU and logs that."""

    def __init__(
        self,
        model: Decoder,
        attention: FixedDecodes,
        state: DeviceSlots,
        recorder: GraphRecorder,
        *,
        sizes: Sequence[int],
        block_tokens: int,
        vocab_size: int,
    ) -> None:
        """``sizes``: batch sizes, ascending, at least one."""
        self._model = model
        self._block_tokens = block_tokens
        self.largest = sizes[-1]
        device, max_blocks = state.device, state.blocks.shape[1]
        self._most_keys = max_blocks * block_tokens
        padding = np.array([[0, 0, state.dummy_slot]] * self.largest)
        self._state = state
        self._inputs = upload(padding, device).clone()
        self._table = torch.zeros((self.largest, max_blocks), dtype=torch.int32, device=device)
        self._contexts = torch.ones(self.largest, dtype=torch.int32, device=device)
        self._chances = torch.zeros(5 * self.largest, device=device)
        self._logits = torch.zeros((self.largest, vocab_size), device=device)
        self._chosen = torch.zeros(self.largest, dtype=torch.int64, device=device)
        self._places = torch.zeros(self.largest, dtype=torch.int64, device=device)
        started, before = time.monotonic(), reserved_bytes(device)
        # Record the largest first: the others then reuse its memory.
        with torch.inference_mode():
            recorded = [self._record(size, attention, recorder) for size in reversed(sizes)]
        self._recorded = recorded[::-1]
        model_log.info(
            "CUDA graphs recorded for decodes of %s rows in %.1f s, %.0f MiB",
            ", ".join(map(str, sizes)),
            time.monotonic() - started,
            # Less if the allocator returned cached memory.
            max(0, reserved_bytes(device) - before) / 2**20,
        )

    def replay(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        chances: NDArray[np.float32] | None = None,
    ) -> Replayed:
        """Compute one token for each of [rows], at most ``largest``, drawn by ``chances`` [5, rows]
        or the likeliest. They become the slots' latest samples. Does not wait.
        """
        rows = len(ids)
        recorded = next(one for one in self._recorded if one.size >= rows)
        inputs = np.full((recorded.size, 3), (0, 0, self._state.dummy_slot))
        inputs[:rows] = np.stack((ids, positions, slots), axis=1)
        upload_to(self._inputs[: recorded.size], inputs)
        recorded.decode.replay()
        chosen = self._chosen
        if chances is not None:
            padded = np.zeros((5, recorded.size), np.float32)
            padded[:, :rows] = chances
            upload_to(self._chances_of(recorded.size), padded)
            recorded.draw.replay()
            (chosen,) = recorded.draw.results
        _, given_ids = recorded.decode.results
        own = self._inputs[:rows, 2]
        return Replayed(self._logits[:rows], given_ids[:rows], own, chosen[:rows])

    def _record(self, size: int, attention: FixedDecodes, recorder: GraphRecorder) -> _Recorded:
        places, table, contexts = self._places[:size], self._table[:size], self._contexts[:size]
        step = attention.decode_step(places, table, contexts, self._most_keys)

        def decode() -> tuple[Tensor, ...]:
            given, positions, slots = self._inputs[:size].T.contiguous()
            ids = self._state.known(given, slots)
            torch.index_select(self._state.blocks, 0, slots, out=table)
            contexts.copy_(positions + 1)
            page = table.gather(1, (positions // self._block_tokens)[:, None]).squeeze(1)
            places.copy_(page.long() * self._block_tokens + positions % self._block_tokens)
            # All sizes share this memory: otherwise each keeps its own results allocated.
            logits, chosen = self._logits[:size], self._chosen[:size]
            logits.copy_(self._model.logits(self._model.forward(ids, positions, step)))
            chosen.copy_(likeliest(logits))
            self._state.take(slots, chosen)
            return chosen, ids

        def draw() -> tuple[Tensor, ...]:
            drawn = draw_plain(self._logits[:size], self._chosen[:size], self._chances_of(size))
            self._state.take(self._inputs[:size, 2], drawn)
            return (drawn,)

        return _Recorded(size, step, recorder.record(decode), recorder.record(draw))

    def _chances_of(self, size: int) -> Tensor:
        # In one piece: a copy to anything else allocates memory on the device first.
        return self._chances[: 5 * size].view(5, size)


def reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
