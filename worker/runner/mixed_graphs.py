"""Steps with prompt chunks, recorded at a few padded token counts and then replayed.

Launching the kernels of such a step one by one can take longer than its arithmetic. A replay is one
call per part, on that part's fixed memory; the unused part of it works on the dummy page::

    tokens [3, tokens]   token id, or PENDING for the slot's last sample | position | slot
    body, by tokens      all layers → hidden [tokens, hidden]
    head, by rows        hidden of each sampling row's last token → logits, likeliest, last samples
    draw, by rows        that of ``DecodeGraphs``

Sizes are recorded at load: the largest first, then every second size, then the sizes between, up to
``MOST_S`` or ``MOST_BYTES``. Other steps are launched kernel by kernel.
"""

import time
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention import AttentionBackend, AttentionStep, PackedBatch
from worker.log import model_log
from worker.models.model import Decoder
from worker.pinned import upload_to
from worker.runner.cuda_graphs import DecodeGraphs, GraphRecorder, GraphRecording, Replayed
from worker.runner.cuda_graphs import reserved_bytes as reserved
from worker.runner.torch_runner import PackedTokens

_STRIDE: Final = 64
MOST_S: Final = 20.0
MOST_BYTES: Final = 2**30
"""Maximum time and memory that recording may take at startup; ``cuda_pool_bytes`` reserves it."""


class MixedSteps(Protocol):
    """Steps of any rows. They read their batch from tensors that ``fill`` refills."""

    most_chunks: int
    """Maximum number of rows in a batch that are chunks."""

    def fill(self, batch: PackedBatch, slots: NDArray[np.int64]) -> None:
        """Fill in a batch with rows in ``slots``; only its lengths are read. Does not wait."""

    def step(self, tokens: int) -> AttentionStep:
        """A step of up to ``tokens`` tokens; it may be recorded before the first batch."""


@runtime_checkable
class FixedMixed(AttentionBackend, Protocol):
    """A backend with ``MixedSteps``."""

    def mixed_steps(self, table: Tensor, places: Tensor, rows: int) -> MixedSteps:
        """``table`` [slots, blocks] int32 has each slot's blocks; ``places`` [tokens] int64 has
        where tokens are stored; both change. ``rows``: maximum number of decodes."""


def token_sizes(most: int) -> list[int]:
    """Token counts to record, up to ``most``: from 512 up, at most an eighth is padding."""
    sizes = [min(_STRIDE, most)]
    while sizes[-1] < most:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(min(most, sizes[-1] + max(_STRIDE, octave // 8)))
    return sizes


def in_order(sizes: Sequence[int]) -> list[int]:
    """The ascending ``sizes`` in recording order."""
    falling = sizes[::-1]
    return [*falling[::2], *falling[1::2]]


def size_for(tokens: int, recorded: Sequence[int]) -> int | None:
    """The recorded size for a step of ``tokens`` tokens. None if padding would exceed a quarter of
    the tokens and the room in a step that mostly reads the weights."""
    size = min((one for one in recorded if one >= tokens), default=None)
    fits = size is not None and size - tokens <= max(2 * _STRIDE, tokens // 4)
    return size if fits else None


class MixedGraphs:
    """Recorded steps with chunks. The constructor records them and logs that."""

    def __init__(
        self,
        model: Decoder,
        attention: FixedMixed,
        decodes: DecodeGraphs,
        recorder: GraphRecorder,
        *,
        most_tokens: int,
        block_tokens: int,
    ) -> None:
        self._model, self._decodes, self._block_tokens = model, decodes, block_tokens
        state = decodes.state
        self._tokens = torch.zeros((3, most_tokens), dtype=torch.int64, device=state.device)
        self._tokens[2] = state.dummy_slot
        self._places = torch.zeros_like(self._tokens[0])
        self._ids = torch.zeros_like(self._tokens[0])
        self._hidden: Tensor | None = None
        self._attention = attention.mixed_steps(state.blocks, self._places, decodes.largest)
        self._bodies: dict[int, GraphRecording] = {}
        began, before = time.monotonic(), reserved(state.device)
        sizes = token_sizes(most_tokens)
        with torch.inference_mode():
            try:
                for size in in_order(sizes):
                    self._bodies[size] = self._record_body(size, recorder)
                    added = reserved(state.device) - before
                    if time.monotonic() - began > MOST_S or added > MOST_BYTES:
                        break
            except torch.OutOfMemoryError:
                if not self._bodies:
                    raise
            self._heads = {size: self._record_head(size, recorder) for size in decodes.sizes}
        model_log.info(
            "CUDA graphs recorded in %.1f s, %.0f MiB for steps with prompts: %s tokens, %d of %d",
            time.monotonic() - began,
            max(0, reserved(state.device) - before) / 2**20,
            ", ".join(map(str, sorted(self._bodies))),
            len(self._bodies),
            len(sizes),
        )

    def compute(
        self, packed: PackedTokens, decodes: int, slots: NDArray[np.int64]
    ) -> Tensor | None:
        """Hidden states [tokens, hidden] of a step with rows in ``slots``, valid until the next
        step; None if no recording fits the step. Does not wait."""
        tokens, chunks = len(packed.ids), len(packed.counts) - decodes
        size = size_for(tokens, list(self._bodies))
        if size is None or chunks > self._attention.most_chunks or self._hidden is None:
            return None
        inputs = np.zeros((3, size), np.int64)
        inputs[2] = self._decodes.state.dummy_slot
        inputs[:, :tokens] = packed.ids, packed.positions, slots[packed.row_of]
        for there, values in zip(self._tokens, inputs, strict=True):
            upload_to(there[:size], values)
        nothing = np.empty((len(slots), 0), np.int64)
        batch = PackedBatch(decodes, packed.counts, packed.contexts, nothing, nothing[0])
        self._attention.fill(batch, slots)
        self._bodies[size].replay()
        return self._hidden[:tokens]

    def choose(
        self,
        last_tokens: NDArray[np.int64],
        slots: NDArray[np.int64],
        chances: NDArray[np.float32] | None,
    ) -> Replayed:
        """Choose tokens for ``last_tokens`` [rows] of the step just computed; see
        ``DecodeGraphs.replay``."""
        rows = len(slots)
        size = min(one for one in self._heads if one >= rows)
        self._decodes.fill(size, last_tokens, last_tokens, slots)
        self._heads[size].replay()
        return self._decodes.drawn(rows, self._heads[size].results[0], chances)

    def _record_body(self, size: int, recorder: GraphRecorder) -> GraphRecording:
        state, step = self._decodes.state, self._attention.step(size)

        def body() -> tuple[Tensor, ...]:
            given, positions, slots = self._tokens[:, :size]
            ids = self._ids[:size]
            ids.copy_(state.known(given, slots))
            page = state.blocks[slots, positions // self._block_tokens].long()
            self._places[:size].copy_(page * self._block_tokens + positions % self._block_tokens)
            hidden = self._model.forward(ids, positions, step)
            if self._hidden is None:  # for the largest size, outside the recording
                self._hidden = torch.zeros_like(hidden)
            self._hidden[:size].copy_(hidden)
            return ()

        return recorder.record(body)

    def _record_head(self, size: int, recorder: GraphRecorder) -> GraphRecording:
        decodes, hidden = self._decodes, self._hidden
        assert hidden is not None

        def head() -> tuple[Tensor, ...]:
            last_tokens, _, slots = decodes.inputs[:size].T.contiguous()
            decodes.choose(self._model, hidden.index_select(0, last_tokens), slots)
            return (self._ids.index_select(0, last_tokens),)

        return recorder.record(head)
