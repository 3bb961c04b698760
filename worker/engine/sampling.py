"""From logits to tokens: one vectorised pass over the rows of a step.

A draw is the inverse of the cumulative distribution at one uniform number per token, and that
number is a hash of (seed, position): what else is in the batch, and how the text was cut into
steps, has no part in it (WK-3).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.protocol import TokenLogprob

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the rows that sample, one entry each; see ``Sampling`` for their meaning.

    ``seed`` is uint64. ``position`` is the index in its text of the token to come.
    ``logprobs`` is -1 where none are wanted. ``bars_eos``: end-of-sequence must not come yet.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]
    logprobs: NDArray[np.int64]
    bars_eos: NDArray[np.bool_]


class Sampled(NamedTuple):
    """``ids`` per row; ``logprobs`` per row, None where not asked for."""

    ids: list[int]
    logprobs: list[TokenLogprob | None] | None


class Sampler:
    """Knows the model's end-of-sequence tokens."""

    def __init__(self, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        """One token per row of ``logits`` [rows, vocabulary] float32, which may be overwritten."""
        wants_logprobs = rows.logprobs.max() >= 0
        # Log-probabilities are the model's own: before masks and temperature.
        logprobs = logits.log_softmax(dim=-1) if wants_logprobs else None
        if rows.bars_eos.any():
            barred = torch.from_numpy(np.flatnonzero(rows.bars_eos)).to(logits.device)
            logits[barred[:, None], self._eos] = -torch.inf
        chosen = logits.argmax(dim=-1)
        drawing = np.flatnonzero(rows.temperature)
        if len(drawing):
            where = torch.from_numpy(drawing).to(logits.device)
            chosen[where] = _draw(logits[where], rows, drawing)
        ids: list[int] = chosen.tolist()
        if logprobs is None:
            return Sampled(ids, None)
        return Sampled(ids, _pick_logprobs(logprobs, chosen, rows.logprobs))


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


def _draw(logits: Tensor, rows: SamplingRows, drawing: NDArray[np.int64]) -> Tensor:
    """Tokens [drawing] for the rows that are not greedy; ``logits`` are theirs."""
    device = logits.device
    logits = logits / torch.from_numpy(rows.temperature[drawing]).to(device)[:, None]
    top_k, top_p = rows.top_k[drawing], rows.top_p[drawing]
    if (top_k > 0).any() or (top_p < 1).any():
        logits = logits.masked_fill(_filtered(logits, top_k, top_p), -torch.inf)
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    draw = torch.from_numpy(uniforms(rows.seed[drawing], rows.position[drawing])).to(device)
    # Strictly less than the total, whatever rounding does: the first sum beyond the target then
    # belongs to a token of positive probability.
    target = torch.minimum(draw[:, None] * total, total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # A broken model's NaNs must not become an id that does not exist.
    return drawn.clamp_(max=logits.shape[-1] - 1)


def _filtered(logits: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """Mask [rows, vocabulary] of the tokens that ``top_k`` or then ``top_p`` leave out.

    Of equally likely tokens at the edge, those with the lower ids stay. A row without a filter
    keeps every token exactly, so its draw is the same in any company.
    """
    device, vocabulary = logits.device, logits.shape[-1]
    unlimited = (top_k <= 0) | (top_k > vocabulary)
    limit = torch.from_numpy(np.where(unlimited, vocabulary, top_k)).to(device)[:, None]
    share = torch.from_numpy(np.where(top_p < 1, top_p, np.inf).astype(np.float32)).to(device)
    ordered = _descending(logits)
    beyond = torch.arange(vocabulary, device=device) >= limit
    probabilities = ordered.masked_fill(beyond, -torch.inf).softmax(dim=-1)
    # A token stays while what came before it is less than the share; the first always stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (~beyond & (before < share[:, None])).sum(dim=-1, keepdim=True).clamp_(min=1)
    edge = ordered.gather(1, kept - 1)
    at_edge = logits == edge
    places_at_edge = kept - (logits > edge).sum(dim=-1, keepdim=True)
    return (logits < edge) | (at_edge & (at_edge.cumsum(dim=-1) > places_at_edge))


def _descending(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":  # numpy's sort is ten times faster than torch's there
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(dim=-1, descending=True).values


def _pick_logprobs(
    logprobs: Tensor, chosen: Tensor, wanted: NDArray[np.int64]
) -> list[TokenLogprob | None]:
    own = logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
    top_values, top_ids = logprobs.topk(min(int(wanted.max()), logprobs.shape[-1]), dim=-1)
    tops = zip(top_ids.tolist(), top_values.tolist(), strict=True)
    return [
        None
        if count < 0
        else TokenLogprob(value, list(zip(ids[:count], values[:count], strict=True)))
        for count, value, (ids, values) in zip(wanted.tolist(), own, tops, strict=True)
    ]
