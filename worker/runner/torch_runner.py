"""Computes steps with a real model: plan → packed batch → hidden states → logits → tokens."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol import PromptLogprobs, TokenLogprob
from worker.attention import PackedBatch
from worker.grammar.masks import MaskedRow, MaskMaker, Masks
from worker.pinned import upload
from worker.runner.forward import Forward
from worker.sampling.prompt_results import (
    CheckedRows,
    PromptScores,
    check_prompts,
    read_prompts,
    score_prompts,
)
from worker.sampling.sampler import NO_TOKEN, Sampled, Sampler
from worker.scheduler.plan import Plan, Row, StepResult
from worker.scheduler.request import PENDING, Request


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Sizes of a runner's tables; ``max_blocks`` is the maximum number of blocks per request."""

    block_tokens: int
    max_running: int
    max_blocks: int


class TorchRunner:
    """A ``Runner`` over a model.

    Data that is fixed while a request runs (block table, sampling parameters) is written once to
    tables with one row per slot. A step then gathers its rows from them without a Python loop.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        limits: SlotLimits,
        *,
        device: torch.device,
    ) -> None:
        self._masks = MaskMaker(sampler.vocab_size, sampler.eos_token_ids)
        self._forward: Forward | None = forward
        self._sampler = sampler
        self._device = device
        self._block_tokens = limits.block_tokens
        self._table = _SlotTable(limits.max_running, limits.max_blocks)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """See ``Runner``."""
        if self._forward is None:
            raise RuntimeError("the runner is closed")
        slots = self._table.slots_of(plan.rows, self._begin)
        constrained = constrained_rows(plan.rows)
        # Masks are made while the model computes: neither holds the GIL.
        masks = self._masks.begin(constrained).result if constrained else None
        return self._compute(self._forward, plan, slots, masks).read()

    def _compute(
        self,
        forward: Forward,
        plan: Plan,
        slots: NDArray[np.int64],
        masks: Callable[[], Masks] | None,
    ) -> "StepOutputs":
        """Compute any step. Waits only for ``masks``."""
        batch, token_ids, positions = self._pack(plan, slots)
        hidden = forward.hidden(batch, token_ids, positions)
        scores = score_prompts(
            plan, hidden, forward.logits, vocab_size=self._sampler.vocab_size, device=self._device
        )
        checked = check_prompts(plan, hidden)
        sampling: Sequence[int] = range(len(plan.rows))
        contexts = batch.context_tokens
        if plan.decodes < len(plan.rows):  # otherwise each token is the last of its row
            sampling = [i for i, row in enumerate(plan.rows) if row.samples]
            if not sampling:
                return StepOutputs(len(plan.rows), sampling, None, scores, checked)
            last_tokens = self._to_device(batch.query_tokens.cumsum()[sampling] - 1)
            hidden, token_ids = hidden[last_tokens], token_ids[last_tokens]
            slots, contexts = slots[sampling], contexts[sampling]
        logits = forward.logits(hidden)
        sampled = self._sampler.sample(logits, slots, contexts, token_ids, masks)
        return StepOutputs(len(plan.rows), sampling, sampled, scores, checked)

    def close(self) -> None:
        """Drop model and pool."""
        self._forward = None
        self._masks.close()
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a lost device cannot free memory
                torch.cuda.empty_cache()

    def _begin(self, slot: int, request: Request) -> None:
        """Prepare ``slot`` for ``request``, whose blocks are already in the table."""
        self._sampler.begin(slot, request)

    def _pack(
        self, plan: Plan, slots: NDArray[np.int64]
    ) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        """The batch, its token ids [tokens] and their positions [tokens]."""
        ids, positions, row_of, counts, contexts = packed_tokens(plan)
        blocks = self._table.blocks[slots[row_of], positions // self._block_tokens]
        host, there = self._block_table(slots, int(contexts.max()))
        batch = PackedBatch(
            decodes=plan.decodes,
            query_tokens=counts,
            context_tokens=contexts,
            block_table=host,
            slots=blocks * self._block_tokens + positions % self._block_tokens,
            table_on_device=there,
        )
        return batch, self._to_device(ids), self._to_device(positions)

    def _block_table(
        self, slots: NDArray[np.int64], longest: int
    ) -> tuple[NDArray[np.int64], torch.Tensor | None]:
        """``PackedBatch``'s two tables for rows in ``slots`` with up to ``longest`` tokens each."""
        return self._table.blocks[slots, : -(-longest // self._block_tokens)], None

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return upload(array, self._device)


class PackedTokens(NamedTuple):
    """A step's tokens [tokens] and their rows. For each row [rows]: the number of its tokens in the
    step, and the number with KV after the step. Host arrays, int64."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    row_of: NDArray[np.int64]
    counts: NDArray[np.int64]
    contexts: NDArray[np.int64]


def packed_tokens(plan: Plan) -> PackedTokens:
    rows = plan.rows
    ids: list[int] = [row.request.tokens[row.start] for row in rows[: plan.decodes]]
    for row in rows[plan.decodes :]:
        ids.extend(row.request.tokens[row.start : row.start + row.count])
    starts = np.array([row.start for row in rows], np.int64)
    if plan.decodes == len(rows):
        counts = np.ones(len(rows), np.int64)
        row_of, positions = np.arange(len(rows)), starts
    else:
        counts = np.array([row.count for row in rows], np.int64)
        row_of = np.repeat(np.arange(len(rows)), counts)
        firsts = np.cumsum(counts) - counts
        positions = np.arange(plan.tokens) - np.repeat(firsts - starts, counts)
    return PackedTokens(np.array(ids, np.int64), positions, row_of, counts, starts + counts)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results of a step of ``rows``, on the device. Rows in ``sampling`` got the tokens
    ``sampled``; the other fields are empty or None if no row asks for it."""

    rows: int
    sampling: Sequence[int]
    sampled: Sampled | None
    scores: Sequence[PromptScores] = ()
    checked: CheckedRows | None = None

    def on_its_way(self) -> "StepOutputs":
        """A copy that the device will write to host memory; read it after an event."""
        return StepOutputs(
            self.rows,
            self.sampling,
            self.sampled and self.sampled.on_its_way(),
            [piece.on_its_way() for piece in self.scores],
            self.checked and self.checked.on_its_way(),
        )

    def read(self) -> StepResult:
        """The results by row. Waits for the device."""
        prompts = read_prompts(self.scores) if self.scores else None
        if self.sampled is None:
            result = StepResult([[] for _ in range(self.rows)], prompts=prompts)
        else:
            ids, logprobs = self.sampled.read()
            result = spread(self.rows, self.sampling, ids, logprobs, prompts)
        # Rows that only process a prompt and have non-finite hidden states.
        if self.checked is not None and (broken := self.checked.read()):
            result.not_finite = [*result.not_finite, *broken]
        return result


class _SlotTable:
    """Each slot's running request, the request's version and its blocks.

    The version changes if the slot's tables may not have the request's current text: it was paused
    and resumed in another slot, or one of its steps was undone.
    """

    def __init__(self, slots: int, max_blocks: int) -> None:
        self._owners: list[Request | None] = [None] * slots
        self._versions = [0] * slots
        self.blocks = np.zeros((slots, max_blocks), np.int64)

    def slots_of(
        self, rows: Sequence[Row], begin: Callable[[int, Request], None]
    ) -> NDArray[np.int64]:
        """Slots [rows]; calls ``begin`` for requests that are new in their slot."""
        owners, versions = self._owners, self._versions
        slots = []
        for row in rows:
            request = row.request
            slot = request.slot
            slots.append(slot)
            if owners[slot] is not request or versions[slot] != request.revision:
                # Padding is gathered and then masked, but 0 times NaN is NaN. The padding is the
                # request's own block, so that no other request's numbers can corrupt its results.
                self.blocks[slot] = request.blocks[-1]
                self.blocks[slot, : len(request.blocks)] = request.blocks
                begin(slot, request)
                owners[slot], versions[slot] = request, request.revision
        return np.array(slots, np.int64)


def constrained_rows(
    rows: Sequence[Row], latest: Mapping[Request, int] | None = None
) -> list[MaskedRow]:
    """Rows that sample under a constraint. ``latest`` has the values of ``PENDING`` tokens."""
    masked = []
    sampling = 0
    for row in rows:
        if not row.samples:
            continue
        job = row.request.job
        if job.constraint is not None:
            generated = row.request.tokens[row.request.prompt_tokens :]
            if latest is not None and generated and generated[-1] == PENDING:
                generated[-1] = latest[row.request]
            bars_end = len(generated) < job.sampling.min_tokens
            masked.append(MaskedRow(sampling, job.constraint, generated, bars_end))
        sampling += 1
    return masked


def spread(
    rows: int,
    sampling: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None] | None,
    prompts: dict[int, list[PromptLogprobs]] | None = None,
) -> StepResult:
    """Map the results of the rows that sampled to all ``rows`` of the step."""
    if len(sampling) == rows and logprobs is None:
        result = StepResult([[token] for token in ids], prompts=prompts)
    else:
        result = StepResult([[] for _ in range(rows)], prompts=prompts)
        for row, token in zip(sampling, ids, strict=True):
            result.ids[row] = [token]
    if logprobs is not None:
        result.logprobs = [None] * rows
        for row, logprob in zip(sampling, logprobs, strict=True):
            result.logprobs[row] = None if logprob is None else [logprob]
    if NO_TOKEN in ids:  # the row's logits are not finite
        broken = [row for row, token in zip(sampling, ids, strict=True) if token == NO_TOKEN]
        result.not_finite = broken
        for row in broken:
            result.ids[row] = []
    return result
