"""A ``Backend`` over llama.cpp: continuous batching of its sequences, and our own sampling.

::

    add ─▶ waiting ─▶ a sequence, its cells reserved to the end ─▶ running ─▶ ended, given up
                                                                     │
    step    one token of each that decodes, pieces of prompts ─▶ llama_decode ─▶ Sampler ─▶ Produced

llama.cpp computes logits and keeps the KV; tokens are drawn by ``worker.sampling``, so that seeds,
penalties, log-probabilities and grammars are the same here as with our own engine (WK-3).
"""

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from protocol import Code, FinishReason, TokenLogprob
from worker.core import Clock, Job
from worker.engines.backend import BackendLoad, Produced, not_finite
from worker.engines.llamacpp.abort import StepAborter
from worker.engines.llamacpp.model import Context, OutOfCells, Piece, StepAborted
from worker.engines.llamacpp.sequences import Sequences, Slot
from worker.errors import ContextOverflow, InvalidCall
from worker.grammar.masks import MaskedRow, MaskMaker
from worker.log import engine_log
from worker.sampling.sampler import NO_TOKEN, Sampler
from worker.scheduler.request import Request, make_request
from worker.scheduler.step_time import StepTime

_LONE_STALLS: Final = 4
"""A step of prompts alone may take this many times ``max_stall_s``; later jobs wait for its end."""
_MIN_PIECE: Final = 8
"""Fewest prompt tokens of a step: fewer are not worth reading the weights for."""


@dataclass(frozen=True, slots=True)
class LlamaCppLimits:
    """Sizes of the backend. ``max_stall_s``: how much prompts may lengthen a step of decodes."""

    block_tokens: int
    max_step_tokens: int
    max_stall_s: float


@dataclass(slots=True, eq=False)
class _Running:
    """A job that has a sequence."""

    handle: int
    request: Request
    slot: Slot
    cached_tokens: int

    @property
    def uncomputed(self) -> int:
        return len(self.request.tokens) - len(self.slot.tokens)

    @property
    def is_decoding(self) -> bool:
        return self.uncomputed == 1 and self.request.generated > 0


class LlamaBackend:
    """A ``Backend`` over llama.cpp. ``clock`` is that of the jobs' deadlines."""

    def __init__(
        self,
        context: Context,
        sequences: Sequences,
        sampler: Sampler,
        limits: LlamaCppLimits,
        clock: Clock,
    ) -> None:
        self._context = context
        self._sequences = sequences
        self._sampler = sampler
        self._limits = limits
        self._clock = clock
        self._masks = MaskMaker(sampler.vocab_size, sampler.eos_token_ids)
        self._watch = StepAborter(context.stop, clock)
        self._step_time = StepTime()
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, _Running] = {}
        self._wake = threading.Condition()
        self._news = False
        self._closed = False
        self._hit_tokens = self._missed_tokens = self._prompt_tokens = 0

    # ── Backend ──────────────────────────────────────────────────────────────────────────────

    def add(self, handle: int, job: Job, max_tokens: int) -> None:
        """See ``Backend``."""
        if job.pooling is not None:
            raise InvalidCall("the llamacpp engine does not support embeddings")
        if job.sampling.prompt_logprobs is not None:
            raise InvalidCall("the llamacpp engine has no log-probabilities of prompts")
        request = make_request(job, submitted_at=self._clock(), own_seed=randbits(64))
        request.limit_tokens = request.prompt_tokens + max_tokens
        longest = min(self._sequences.longest, self._context.sequence_cells)
        if request.limit_tokens > longest:
            raise ContextOverflow(
                f"prompt and answer come to {request.limit_tokens} tokens, but this model's maximum"
                f" context length is {longest} tokens: as many KV cells can one text have"
            )
        ends = set(job.sampling.stop_token_ids)
        if not job.sampling.ignore_eos:
            ends.update(self._sampler.eos_token_ids)
        request.end_ids = frozenset(ends)
        if job.constraint is not None:
            job.constraint.when_ready(self.interrupt)
        self._waiting.append((handle, request))

    def abort(self, handles: Collection[int]) -> None:
        """See ``Backend``."""
        for handle in handles:
            running = self._running.pop(handle, None)
            if running is not None:
                self._release(running.slot)
        if self._waiting and handles:
            gone = set(handles)
            self._waiting = deque(one for one in self._waiting if one[0] not in gone)

    def holds(self, handle: int) -> bool:
        """See ``Backend``."""
        return False

    @property
    def has_failed(self) -> bool:
        """See ``Backend``."""
        return False

    @torch.inference_mode()
    def step(self, wait_s: float) -> Sequence[Produced]:
        """See ``Backend``."""
        produced = self._start()
        if produced:
            return produced
        rows, pieces = self._plan()
        if not rows:
            self._wait(wait_s)
            return ()
        constrained = self._constrained(rows, pieces)
        # Masks are made while the model computes: neither needs the interpreter meanwhile.
        masks = self._masks.begin(constrained) if constrained else None
        logits = self._compute(rows, pieces)
        if logits is None:
            return ()
        sampling = [row for row, piece in zip(rows, pieces, strict=True) if piece.wants_logits]
        if not sampling:
            return ()
        slots = np.array([row.slot.index for row in sampling], np.int64)
        positions = np.array([len(row.request.tokens) for row in sampling], np.int64)
        last_ids = torch.tensor([row.request.tokens[-1] for row in sampling])
        sampled = self._sampler.sample(
            torch.from_numpy(logits),
            slots,
            positions,
            last_ids,
            None if masks is None else masks.result,
        )
        ids, logprobs = sampled.read()
        found = logprobs or [None] * len(ids)
        return [
            self._book(row, token, logprob)
            for row, token, logprob in zip(sampling, ids, found, strict=True)
        ]

    def interrupt(self) -> None:
        """See ``Backend``. Also stops a step whose jobs have all been given up."""
        with self._wake:
            self._news = True
            self._wake.notify()
        self._watch.look()

    def load(self) -> BackendLoad:
        """See ``Backend``."""
        size = self._limits.block_tokens
        return BackendLoad(
            kv_blocks_total=self._sequences.cells // size,
            kv_blocks_used=-(-self._sequences.reserved_cells // size),
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_cached=self._sequences.idle_cells // size,
            hit_blocks_total=self._hit_tokens // size,
            missed_blocks_total=self._missed_tokens // size,
            evicted_blocks_total=self._sequences.evicted_tokens // size,
            prompt_tokens_total=self._prompt_tokens,
        )

    def close(self) -> None:
        """See ``Backend``."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        self._masks.close()
        self._running.clear()
        self._waiting.clear()
        self._context.close()

    # ── starting ─────────────────────────────────────────────────────────────────────────────

    def _start(self) -> list[Produced]:
        """Give sequences to waiting jobs, in order; returns those whose grammar is invalid."""
        failed = []
        for _ in range(len(self._waiting)):
            handle, request = self._waiting.popleft()
            constraint = request.job.constraint
            if constraint is not None and constraint.is_ready and constraint.error:
                failed.append(_grammar_failed(handle, constraint.error))
            elif (constraint is not None and not constraint.is_ready) or not self._begin(
                handle, request
            ):
                self._waiting.append((handle, request))
        return failed

    def _begin(self, handle: int, request: Request) -> bool:
        """Give a request a sequence; False while none is free."""
        taken = self._sequences.take(
            request.tokens[: request.prompt_tokens], request.limit_tokens, request.job.cache_salt
        )
        if taken is None:
            return False
        slot, kept = taken.slot, taken.kept
        if not self._context.cut(slot.index, taken.cut_to):
            # The sequence's state cannot be cut: all of the prompt is computed.
            self._context.cut(slot.index, 0)
            slot.tokens, kept = [], 0
        elif taken.source is not None:
            self._context.copy(taken.source.index, slot.index, taken.copied)
        for gone in taken.evicted:
            self._context.cut(gone.index, 0)
        request.slot = slot.index
        self._sampler.begin(slot.index, request)
        self._running[handle] = _Running(handle, request, slot, kept)
        self._hit_tokens += kept
        self._missed_tokens += request.prompt_tokens - kept
        return True

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def _plan(self) -> tuple[list[_Running], list[Piece]]:
        """Rows of the next step: one token of each decoding job, then pieces of prompts."""
        rows = [row for row in self._running.values() if row.is_decoding]
        pieces = [_piece(row, 1) for row in rows]
        left = self._prompt_budget(len(rows))
        for row in self._running.values():
            if left <= 0:
                break
            if not row.is_decoding:
                piece = _piece(row, left)
                left -= len(piece.tokens)
                rows.append(row)
                pieces.append(piece)
        return rows, pieces

    def _prompt_budget(self, decodes: int) -> int:
        """Most prompt tokens for a step that also carries ``decodes`` tokens of others."""
        room = min(self._limits.max_step_tokens, self._context.batch_tokens) - decodes
        times = self._step_time
        # Where a decode alone takes longer than ``max_stall_s``, prompts may double it.
        stall_s = max(self._limits.max_stall_s, times.plain_step_s)
        if not decodes:
            stall_s *= _LONE_STALLS
        return max(min(room, _MIN_PIECE), times.prompt_tokens_within(stall_s, room))

    def _constrained(self, rows: list[_Running], pieces: list[Piece]) -> list[MaskedRow]:
        found = []
        sampling = 0
        for row, piece in zip(rows, pieces, strict=True):
            if not piece.wants_logits:
                continue
            request = row.request
            if request.job.constraint is not None:
                generated = request.tokens[request.prompt_tokens :]
                bars_end = len(generated) < request.job.sampling.min_tokens
                found.append(MaskedRow(sampling, request.job.constraint, generated, bars_end))
            sampling += 1
        return found

    def _compute(self, rows: list[_Running], pieces: list[Piece]) -> NDArray[np.float32] | None:
        """Logits of the rows that sample; None where the step was stopped or found no cells."""
        began = self._clock()
        self._watch.begin([row.request.job for row in rows])
        try:
            logits = self._context.compute(pieces)
        except StepAborted:
            self._take_stock(rows, pieces)
            return None
        except OutOfCells:
            # Cells are reserved, so that only those that idle sequences hold can be in the way.
            idle = self._sequences.forget_idle()
            if not idle:
                raise
            engine_log.warning("llama.cpp had no KV cells for a step; idle texts are forgotten")
            for slot in idle:
                self._context.cut(slot.index, 0)
            return None
        finally:
            self._watch.end()
        prompt_tokens = 0
        for row, piece in zip(rows, pieces, strict=True):
            row.slot.tokens += piece.tokens
            prompt_tokens += 0 if row.request.generated else len(piece.tokens)
        self._learn(self._clock() - began, rows, prompt_tokens)
        return logits

    def _learn(self, duration_s: float, rows: list[_Running], prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        if any(row.request.generated for row in rows):
            self._step_time.decoded(duration_s, 1, rows=len(rows), prompt_tokens=prompt_tokens)
        self._step_time.prefilled(duration_s, prompt_tokens)

    def _take_stock(self, rows: list[_Running], pieces: list[Piece]) -> None:
        """Find out, after a step that was stopped midway, which of its tokens are in the cells."""
        for row, piece in zip(rows, pieces, strict=True):
            slot = row.slot
            new = self._context.held(slot.index) - len(slot.tokens)
            # The last token is computed again in any case, since its logits are missing.
            last = len(row.request.tokens) - 1
            slot.tokens = [*slot.tokens, *piece.tokens[: max(0, new)]][:last]
            self._context.cut(slot.index, len(slot.tokens))

    def _book(self, row: _Running, token: int, logprob: TokenLogprob | None) -> Produced:
        """Record a row's new token, and end its job where that token ends it."""
        request = row.request
        constraint = request.job.constraint
        if constraint is not None and constraint.error:
            # No mask could be made, so that the token drawn may break the grammar.
            self._end(row)
            return _grammar_failed(row.handle, constraint.error)
        if token == NO_TOKEN:
            self._end(row, is_sound=False)
            return not_finite(row.handle)
        first = request.generated == 0
        request.tokens.append(token)
        end: FinishReason | None = None
        if token in request.end_ids:
            end = FinishReason.STOP
        elif len(request.tokens) >= request.limit_tokens:
            end = FinishReason.LENGTH
        if end is not None:
            self._end(row)
        return Produced(
            row.handle,
            (token,),
            logprobs=None if logprob is None else [logprob],
            end=end,
            cached_tokens=row.cached_tokens if first else 0,
        )

    def _end(self, row: _Running, *, is_sound: bool = True) -> None:
        del self._running[row.handle]
        self._release(row.slot, is_sound=is_sound)

    def _release(self, slot: Slot, *, is_sound: bool = True) -> None:
        if not self._sequences.release(slot, is_sound=is_sound):
            self._context.cut(slot.index, 0)

    def _wait(self, wait_s: float) -> None:
        with self._wake:
            if not self._news:
                self._wake.wait(wait_s)
            self._news = False


def _piece(row: _Running, most: int) -> Piece:
    start = len(row.slot.tokens)
    tokens = row.request.tokens[start : start + most]
    return Piece(row.slot.index, start, tokens, start + len(tokens) == len(row.request.tokens))


def _grammar_failed(handle: int, why: str) -> Produced:
    return Produced(handle, end=FinishReason.ERROR, code=Code.INVALID_REQUEST, message=why)
