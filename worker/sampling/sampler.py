"""Draws tokens from logits, in one vectorized pass over the rows of a step.

::

    logits ─▶ log-probabilities ─▶ bias, penalties, barred, mask ─▶ argmax
               (the model's own)                                 └▶ temperature, filters, draw

Rows without parameters end at the argmax. If the largest of a row's logits is NaN or infinite,
which it is if any of them is NaN, the row gets ``NO_TOKEN``. No code here waits for the device:
positions, slots and parameters are host arrays; tokens are device tensors until ``Sampled.read``.

A draw is the inverse of the cumulative distribution at one uniform number per token. That number is
a hash of (seed, position): it does not depend on the rest of the batch or on how the text was cut
into steps (WK-3). On CUDA a ``triton`` kernel draws, on the CPU a loop that numba compiles; without
either, several of torch's operators do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol import TokenLogprob
from worker.cpu_kernels import draws as cpu_draws
from worker.cpu_kernels.compiled import compiler_problem
from worker.grammar.masks import Masks
from worker.pinned import download, upload
from worker.sampling.filters import (
    BIASED,
    CONSTRAINED,
    DRAWS,
    PENALISED,
    WANTS_LOGPROBS,
    Biases,
    Penalties,
    SamplingTable,
    apply_masks_,
    kept_,
    rows_of,
)
from worker.scheduler.request import Request

NO_TOKEN: Final = -1
"""Id of a row with non-finite logits."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class TokenScores(NamedTuple):
    """Log-probabilities of tokens [rows] and of the likeliest [rows, top], on the device."""

    own: Tensor
    ranks: Tensor
    """Number of tokens at least as likely as the row's own, as in vLLM."""
    top_values: Tensor
    top_ids: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, ids: Tensor, top: int) -> "TokenScores":
        """Scores of ``ids`` [rows] and of ``top`` tokens, from ``logprobs`` [rows, vocabulary]."""
        own = logprobs.gather(1, ids[:, None])
        ranks = (logprobs >= own).sum(dim=-1, dtype=torch.int32)
        return cls(own.squeeze(1), ranks, *logprobs.topk(min(top, logprobs.shape[-1]), dim=-1))

    def on_its_way(self) -> "TokenScores":
        """See ``Sampled.on_its_way``."""
        return TokenScores(*map(download, self))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens, on the device. ``ids`` [rows] int64, perhaps ``NO_TOKEN``."""

    ids: Tensor
    logprobs: "_Logprobs | None" = None

    def read(self) -> tuple[list[int], list[TokenLogprob | None] | None]:
        """Ids and log-probabilities per row; None if not requested. Waits for the device."""
        ids: list[int] = self.ids.tolist()
        return ids, None if self.logprobs is None else self.logprobs.read(len(ids))

    def on_its_way(self) -> "Sampled":
        """A copy that the device will write to host memory; read it after an event."""
        logprobs = self.logprobs
        sent = logprobs and replace(logprobs, scores=logprobs.scores.on_its_way())
        return Sampled(download(self.ids), sent)


class Sampler:
    """Draws tokens by the parameters and the text so far of the request in each slot."""

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        device: torch.device,
        *,
        slots: int,
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        """``max_tokens`` is the maximum length of a slot's text, in tokens."""
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
        # On CUDA an assignment to chosen places waits for the device if the value is a number.
        self._never = torch.full((1,), -torch.inf, device=device)
        self._device = device
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self._table = SamplingTable(slots)
        self._penalties = Penalties(slots, vocab_size, max_tokens, device)
        self._biases = Biases(slots, device)
        self._barred: dict[int, NDArray[np.int64]] = {}
        """Clients' stop tokens by slot; ``min_tokens`` bars them like the model's end tokens."""
        self._compiles = device.type == "cpu" and compiler_problem() is None
        self._kernels = _kernels_for(device)

    def compile_draws(self) -> None:
        """Compile the kernel that draws on CUDA, so that no request waits for it."""
        if self._kernels is not None:
            logits = torch.zeros((1, self.vocab_size), device=self._device)
            chances = torch.ones((5, 1), device=self._device)
            draw_plain(logits, logits[:, 0].long(), chances)

    def begin(self, slot: int, request: Request) -> None:
        """Record that ``request`` has ``slot`` from now on."""
        needs = self._table.fill(slot, request)
        if request.job.sampling.min_tokens and request.job.sampling.stop_token_ids:
            self._barred[slot] = np.array(request.job.sampling.stop_token_ids, np.int64)
        else:
            self._barred.pop(slot, None)
        if needs & PENALISED:
            self._penalties.begin(slot, request)
        if needs & BIASED:
            self._biases.begin(slot, request.job.sampling.logit_bias)

    def sample(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        last_ids: Tensor,
        masks: Callable[[], Masks] | None = None,
    ) -> Sampled:
        """Draw a token per row of ``logits`` [rows, vocabulary] float32, which may be changed.

        ``slots`` [rows] has each row's request. The new token is at ``positions`` [rows] of its
        text, after ``last_ids`` [rows] (on the device). ``masks`` returns the masks of the
        constrained rows, and may wait for them.
        """
        table = self._table
        needs = table.needs[slots]
        barred = positions < table.first_free_position[slots]
        some: int = np.bitwise_or.reduce(needs)
        if not some and not barred.any():
            return Sampled(likeliest(logits))
        finite = self._finite_rows(logits)
        logprobs = None
        if some & WANTS_LOGPROBS:
            wanting = np.flatnonzero(needs & WANTS_LOGPROBS)
            logprobs = (wanting, rows_of(logits, wanting).log_softmax(dim=-1))
        if some & BIASED:
            rows = np.flatnonzero(needs & BIASED)
            self._biases.add_(logits, rows, slots[rows])
        if some & PENALISED:
            rows = np.flatnonzero(needs & PENALISED)
            self._penalties.apply_(logits, rows, slots[rows], positions[rows], last_ids, table)
        if barred.any():
            rows = np.flatnonzero(barred)
            logits[self._upload(rows)[:, None], self._eos] = self._never
            for row in rows:
                if (own := self._barred.get(int(slots[row]))) is not None:
                    logits[row, self._upload(own)] = self._never
        if some & CONSTRAINED:
            assert masks is not None
            apply_masks_(logits, masks())
        if not some & DRAWS:
            chosen = _argmax(logits)
        else:
            drawing = np.flatnonzero(needs & DRAWS)
            drawn = self._draw(rows_of(logits, drawing), slots[drawing], positions[drawing])
            if len(drawing) == len(slots):
                chosen = drawn
            else:
                chosen = _argmax(logits)
                chosen[self._upload(drawing)] = drawn
        marked = mark(chosen, finite)
        if logprobs is None:
            return Sampled(marked)
        wanting, values = logprobs
        counts = table.logprobs[slots[wanting]]
        scores = TokenScores.of(values, rows_of(chosen, wanting), int(counts.max()))
        return Sampled(marked, _Logprobs(wanting, counts, scores))

    def plain_chances(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.float32] | None:
        """Parameters of ``draw_plain`` for rows like those of ``sample``: [5, rows] float32,
        temperature (0: the likeliest token), ``min_p``, a number in [0, 1), ``top_k`` (0: all) and
        ``top_p``. None if a row needs more than a draw, or more than ``draw_plain`` supports here.
        """
        table = self._table
        needs = table.needs[slots]
        if (needs > DRAWS).any() or (positions < table.first_free_position[slots]).any():
            return None
        is_drawn = needs == DRAWS
        if not is_drawn.any():
            return np.zeros((5, len(slots)), np.float32)
        chances = self._chances(slots, positions)
        chances[0] *= is_drawn
        if self._kernels is None and (is_drawn & _filtered(chances)).any():
            return None
        return chances

    def _chances(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        table, top_k = self._table, self._table.top_k[slots]
        return np.stack(
            (
                table.temperature[slots],
                table.min_p[slots],
                uniforms(table.seed[slots], positions),
                # Exact in float32: no vocabulary has close to 2^24 tokens.
                np.where((top_k > 0) & (top_k < self.vocab_size), top_k, 0).astype(np.float32),
                table.top_p[slots],
            )
        )

    def _finite_rows(self, logits: Tensor) -> Tensor:
        """Mask [rows] of the finite rows. On the CPU, the other rows are set to 0, so that later
        code sees no NaN."""
        if self._device.type != "cpu":
            return logits.amax(dim=-1).isfinite()
        rows = logits.numpy()
        finite = np.isfinite(rows.max(axis=-1))
        if not finite.all():
            rows[~finite] = 0
        return torch.from_numpy(finite)

    def _draw(
        self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Tensor:
        """Draw tokens [rows] from ``logits`` [rows, vocabulary]."""
        table = self._table
        if self._compiles:
            draws = uniforms(table.seed[slots], positions)
            filters = table.min_p[slots], table.top_k[slots], table.top_p[slots]
            drawn = cpu_draws.draw_rows(
                logits.numpy(), table.temperature[slots], *filters, draws, torch.get_num_threads()
            )
            return torch.from_numpy(drawn)
        chances = self._chances(slots, positions)
        nothing = torch.zeros(len(slots), dtype=torch.int64, device=self._device)
        is_filtered = bool(_filtered(chances).any())
        return draw_plain(logits, nothing, self._upload(chances), is_filtered=is_filtered)

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        return upload(array, self._device)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Scores of the rows ``wanting`` them, which want ``counts`` likeliest tokens each."""

    wanting: NDArray[np.int64]
    counts: NDArray[np.int64]
    scores: TokenScores

    def read(self, rows: int) -> list[TokenLogprob | None]:
        found: list[TokenLogprob | None] = [None] * rows
        lists = (array.tolist() for array in (self.wanting, self.counts, *self.scores))
        for row, count, own, rank, values, ids in zip(*lists, strict=True):
            top = list(zip(ids[:count], values[:count], strict=True))
            found[row] = TokenLogprob(own, top, rank)
        return found


def mark(ids: Tensor, finite: Tensor) -> Tensor:
    """``ids`` [rows] with ``NO_TOKEN`` where a row is not ``finite`` [rows]."""
    return torch.where(finite, ids, NO_TOKEN)


def likeliest(logits: Tensor) -> Tensor:
    """Each row's argmax; ``NO_TOKEN`` if its logit is not finite: an argmax ranks NaN highest."""
    ids = _argmax(logits)
    if logits.device.type != "cpu":
        return mark(ids, logits.gather(1, ids[:, None]).squeeze(1).isfinite())
    # numpy is several times as fast as torch for work this small.
    rows, found = logits.numpy(), ids.numpy()
    finite = np.isfinite(rows[np.arange(len(rows)), found])
    if not finite.all():
        found[~finite] = NO_TOKEN
    return ids


def _argmax(logits: Tensor) -> Tensor:
    """Index [rows] of each row's largest logit, the first where several are equal.

    On the CPU by numpy, which compares a vector at a time: 10 to 20 times as fast as torch.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


@cache
def _kernels() -> ModuleType | None:
    try:
        from worker.sampling import triton_draws
    except ImportError:
        return None
    return triton_draws


def _kernels_for(device: torch.device) -> ModuleType | None:
    return _kernels() if device.type == "cuda" else None


def _filtered(chances: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows of ``chances`` have ``top_k`` or ``top_p``."""
    filtered: NDArray[np.bool_] = (chances[3] > 0) | (chances[4] < 1)
    return filtered


def draw_plain(
    logits: Tensor, chosen: Tensor, chances: Tensor, *, is_filtered: bool = False
) -> Tensor:
    """Draw tokens [rows] from ``logits`` [rows, vocabulary] by ``chances`` (``plain_chances``).
    ``chosen`` [rows] are the likeliest tokens, or ``NO_TOKEN``. ``is_filtered``: whether any row
    has ``top_k`` or ``top_p``, which needs a sort without the kernel.

    The draw is the same as for other rows, so that a text does not depend on which of its steps
    were recorded.
    """
    kernels = _kernels_for(logits.device)
    if kernels is not None:
        drawn: Tensor = kernels.draw_rows(logits, chosen, chances)
        return drawn
    temperatures, least, draws, top_k, top_p = chances
    draws_at_all = temperatures > 0
    scaled = logits / torch.where(draws_at_all, temperatures, 1.0)[:, None]
    # In place, because memory that a recording allocates stays allocated.
    weights = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
    if is_filtered:
        weights = kept_(weights, top_k, top_p, least)
    else:
        weights = weights.masked_fill_(weights < least[:, None], 0.0)
    return torch.where(draws_at_all & (chosen >= 0), _pick_at(weights, draws), chosen)


def _pick_at(weights: Tensor, draws: Tensor) -> Tensor:
    """Index [rows] at which the cumulative ``weights`` [rows, tokens] exceed ``draws`` [rows]."""
    # In float64: the summation order depends on the number of rows and must not change a token.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly less than the total, despite rounding: the first sum beyond the target then belongs
    # to a token of positive weight.
    target = torch.minimum(draws[:, None] * total, total.nextafter(torch.zeros_like(total)))
    picked = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # A broken model's NaNs must not become a nonexistent id.
    return picked.clamp_(max=weights.shape[-1] - 1)


def uniforms(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float32]:
    """A number in [0, 1) per (seed, position): SplitMix64 (Steele, Lea, Flood 2014) as a hash.

    24 bits, so that each is exact in float32 and less than 1.
    """
    counter = (position.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = _mix(_mix(seed) + counter) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-24)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
