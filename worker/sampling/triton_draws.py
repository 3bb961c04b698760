# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Draws one token per row, filters included, in one launch. Importing needs ``triton``.

A program computes one row and reads its logits several times from the L2 cache, which holds a
step's logits. It does not use the other rows, so a draw does not depend on them (WK-3)::

    largest logit ─▶ edge of top_k ─▶ edge of top_p ─▶ sums of blocks ─▶ the token in its block
                     └ only rows that have them ┘

An edge is the value of the least likely token that stays. It is found without a sort: thresholds
cut the range of values into quarters, and a pass counts the tokens, or sums the weights, above each
threshold, until all tokens in the edge's quarter have one value. The passes read about the largest
thousand logits, saved beforehand, if these contain the edge, as they usually do. The semantics
match ``filters.kept_``. Tokens are drawn in order of id, as in ``draw_loops``, so that the same
number draws the same token except for rounding.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 4096
_WARPS: Final = 16
_ASIDE: Final = 3
"""Number of logits saved per lane; a lane has the logits at the same position in each block."""


def draw_rows(logits: Tensor, chosen: Tensor, chances: Tensor, *, block: int = _BLOCK) -> Tensor:
    """Draw a token [rows] int64 from each row of ``logits`` [rows, vocabulary] float32.

    By ``chances`` [5, rows] float32: temperature, ``min_p``, a number in [0, 1), ``top_k`` and
    ``top_p``. A row gets the token ``chosen`` [rows] int64 instead if its temperature is 0, if
    ``chosen`` is negative, or if its largest logit is NaN or infinite. Does not wait, and can be
    recorded in a CUDA graph.
    """
    rows, vocabulary = logits.shape
    assert logits.dtype == chances.dtype == torch.float32 and chosen.dtype == torch.int64
    assert chances.shape == (5, rows) and chances.stride(1) == 1 and vocabulary < 2**24
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    aside = torch.empty((rows, _ASIDE * block), dtype=torch.float32, device=logits.device)
    draw[(rows,)](
        logits.contiguous(),
        chosen.contiguous(),
        chances,
        aside,
        out,
        chances.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=block,
        ASIDE=_ASIDE * block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocabulary, block)),
        num_warps=_WARPS,
    )
    return out


# Arguments that differ between batches must not cause compilations: one compilation per model.
@triton.jit(
    do_not_specialize=["chance_stride"],
    do_not_specialize_on_alignment=["chosen", "chances", "out"],
)
def draw(
    logits,  # [rows, VOCABULARY]
    chosen,  # [rows]
    chances,  # [5, rows]
    aside,  # [rows, ASIDE], scratch
    out,  # [rows]
    chance_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    ASIDE: tl.constexpr,  # 3 * BLOCK
    BLOCKS: tl.constexpr,  # that cover the vocabulary, or more: a power of two
):
    place = tl.program_id(0).to(tl.int64)
    given = tl.load(chosen + place)
    heat = tl.load(chances + place)
    picked = given
    if (heat > 0) & (given >= 0):
        row = logits + place * VOCABULARY
        top, is_finite = _top(row, VOCABULARY, BLOCK)
        if is_finite:
            chance = chances + place
            least = tl.load(chance + chance_stride)
            number = tl.load(chance + 2 * chance_stride)
            top_k = tl.load(chance + 3 * chance_stride).to(tl.int32)
            top_p = tl.load(chance + 4 * chance_stride)
            scale = tl.div_rn(1.4426950408889634, heat)  # log2(e)
            # Logits further below the largest have weight 0 in float32.
            low = tl.maximum(top - 104.0 * heat, -3.0e38)
            value = tl.full((), float("-inf"), tl.float32)
            cut = tl.full((), VOCABULARY, tl.int32)
            if ((top_k > 0) & (top_k < VOCABULARY)) | (top_p < 1):
                mine = aside + place * ASIDE
                _put_aside(row, mine, VOCABULARY, BLOCK)
                value, cut = _edges(
                    row, mine, top, scale, low, top_k, top_p, VOCABULARY, BLOCK, ASIDE, BLOCKS
                )
            found = _pick(row, top, scale, value, cut, least, number, VOCABULARY, BLOCK, BLOCKS)
            picked = tl.where(found >= 0, found.to(tl.int64), given)
    tl.store(out + place, picked)


@triton.jit
def _logits(row, at, VOCABULARY: tl.constexpr):
    return tl.load(row + at, mask=at < VOCABULARY, other=float("-inf"))


@triton.jit
def _weights(x, top, scale):
    """Probabilities relative to the likeliest token, whose weight is exactly 1."""
    return tl.exp2((x - top) * scale)


@triton.jit
def _top(row, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The row's largest logit, infinity if there is a NaN, and whether it is finite."""
    at = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        x = _logits(row, start + at, VOCABULARY)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(tl.where(largest == largest, largest, float("inf")))
    return top, (top > float("-inf")) & (top < float("inf"))


@triton.jit
def _put_aside(row, aside, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Write the row's largest logits to ``aside`` [3 * BLOCK]: all logits from some value up.

    They are the three largest of each lane, without those not above any lane's fourth largest.
    """
    at = tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), float("-inf"), tl.float32)
    second = first
    third = first
    fourth = first
    for start in range(0, VOCABULARY, BLOCK):
        x = _logits(row, start + at, VOCABULARY)
        less = tl.minimum(first, x)
        first = tl.maximum(first, x)
        x = tl.minimum(second, less)
        second = tl.maximum(second, less)
        less = tl.minimum(third, x)
        third = tl.maximum(third, x)
        fourth = tl.maximum(fourth, less)
    bound = tl.max(fourth)
    tl.store(aside + at, tl.where(first > bound, first, float("-inf")))
    tl.store(aside + BLOCK + at, tl.where(second > bound, second, float("-inf")))
    tl.store(aside + 2 * BLOCK + at, tl.where(third > bound, third, float("-inf")))
    tl.debug_barrier()  # Other threads will read it.


@triton.jit
def _edges(
    row,
    aside,
    top,
    scale,
    low,
    top_k,
    top_p,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    ASIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The tokens that the filters keep: those above a value, and those equal to it up to an id.

    ``ties`` tokens have the value; the first ``stays`` of them stay.
    """
    value = tl.full((), float("-inf"), tl.float32)
    ties = tl.full((), 0, tl.int32)
    stays = tl.full((), 0, tl.int32)
    if (top_k > 0) & (top_k < VOCABULARY):
        goal = top_k.to(tl.float64)
        value, before, ties = _edge(aside, top, scale, low, goal, True, ASIDE, BLOCK)
        if ties == 0:
            value, before, ties = _edge(row, top, scale, low, goal, True, VOCABULARY, BLOCK)
        stays = tl.minimum(top_k - before.to(tl.int32), ties)
    if top_p < 1:
        total = _sum_above(row, top, scale, value, VOCABULARY, BLOCK)
        total += stays.to(tl.float64) * _weights(value, top, scale).to(tl.float64)
        # The first token stays even if the share is 0.
        share = tl.maximum(top_p.to(tl.float64) * total, 1e-30)
        low = tl.maximum(low, value)
        edge, before, equals = _edge(aside, top, scale, low, share, False, ASIDE, BLOCK)
        if equals == 0:
            edge, before, equals = _edge(row, top, scale, low, share, False, VOCABULARY, BLOCK)
        # None equals it where rounding has what ``top_k`` left sum up to less than the share.
        if equals > 0:
            most = tl.where(edge == value, stays, equals)
            # Equal tokens stay while the sum before them is less than the share.
            fit = tl.ceil((share - before) / _weights(edge, top, scale).to(tl.float64))
            stays = tl.minimum(fit, most.to(tl.float64)).to(tl.int32)
            value = edge
            ties = equals
    cut = tl.full((), VOCABULARY, tl.int32)
    if stays < ties:
        cut = _id_of_equal(row, value, stays, VOCABULARY, BLOCK, BLOCKS)
    return value, cut


@triton.jit
def _edge(
    values,
    top,
    scale,
    low,
    goal,
    BY_COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest of ``values`` [SIZE] such that those from it up have a sum of weights, or a
    number, of ``goal`` or more; that of those above it; how many equal it.

    ``low``: the least value in question. If even those from it up do not reach the goal, the value
    is -inf, and none equals it.
    """
    at = tl.arange(0, BLOCK)
    # The edge is at ``low`` or above, below ``high``, and not above ``most``. A float32 sum does
    # not shrink when a weight is added, so that rounding cannot leave nothing in between.
    high = tl.full((), float("inf"), tl.float32)
    most = top
    before = tl.full((), 0.0, tl.float64)
    value = tl.full((), float("-inf"), tl.float32)
    equals = tl.full((), 0, tl.int32)
    is_first = tl.full((), 1, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching > 0:
        # By value, not by bits: logits lie about evenly. The last threshold is above ``low`` even
        # where no number lies between it and ``most``, so that this comes to an end.
        third = tl.minimum(0.25 * low + 0.75 * most, most)
        third = tl.where(third > low, third, most)
        second = tl.minimum(0.5 * low + 0.5 * most, third)
        first = tl.minimum(0.75 * low + 0.25 * most, second)
        # The first pass shows whether the goal is reached at all.
        first = tl.where(is_first > 0, low, first)
        above_1 = tl.zeros((BLOCK,), tl.int32 if BY_COUNT else tl.float32)
        above_2 = above_1
        above_3 = above_1
        inside = tl.zeros((BLOCK,), tl.int32)
        smallest = tl.full((BLOCK,), float("inf"), tl.float32)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, SIZE, BLOCK):
            x = _logits(values, start + at, SIZE)
            if BY_COUNT:
                above_1 += (x >= first).to(tl.int32)
                above_2 += (x >= second).to(tl.int32)
                above_3 += (x >= third).to(tl.int32)
            else:
                weights = _weights(x, top, scale)
                above_1 += tl.where(x >= first, weights, 0.0)
                above_2 += tl.where(x >= second, weights, 0.0)
                above_3 += tl.where(x >= third, weights, 0.0)
            is_inside = (x >= low) & (x < high)
            inside += is_inside.to(tl.int32)
            smallest = tl.minimum(smallest, tl.where(is_inside, x, float("inf")))
            largest = tl.maximum(largest, tl.where(is_inside, x, float("-inf")))
        lowest = tl.min(smallest)
        highest = tl.max(largest)
        sum_1 = tl.sum(above_1.to(tl.float64))
        sum_2 = tl.sum(above_2.to(tl.float64))
        sum_3 = tl.sum(above_3.to(tl.float64))
        if (is_first > 0) & (sum_1 < goal):
            searching = tl.full((), 0, tl.int32)
        elif lowest >= highest:
            value = lowest
            equals = tl.sum(inside)
            searching = tl.full((), 0, tl.int32)
        elif sum_3 >= goal:
            low = third
        elif sum_2 >= goal:
            low = second
            high = third
            before = sum_3
        elif sum_1 >= goal:
            low = first
            high = second
            before = sum_2
        else:
            high = first
            before = sum_1
        low = tl.maximum(low, lowest)
        most = tl.minimum(high, highest)
        is_first = tl.full((), 0, tl.int32)
    return value, before, equals


@triton.jit
def _sum_above(row, top, scale, value, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        x = _logits(row, start + at, VOCABULARY)
        sums += tl.where(x > value, _weights(x, top, scale), 0.0)
    return tl.sum(sums.to(tl.float64))


@triton.jit
def _id_of_equal(
    row, value, number, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The id of the token that is ``number`` (from 1) among the tokens with ``value``."""
    at = tl.arange(0, BLOCK)
    index = tl.arange(0, BLOCKS)
    counts = tl.zeros((BLOCKS,), tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        equal = _logits(row, start + at, VOCABULARY) == value
        counts = tl.where(index == start // BLOCK, tl.sum(equal.to(tl.int32)), counts)
    block = tl.sum((tl.cumsum(counts) < number).to(tl.int32))
    before = tl.sum(tl.where(index < block, counts, 0))
    at += block * BLOCK
    equal = (_logits(row, at, VOCABULARY) == value).to(tl.int32)
    is_before = (equal > 0) & (before + tl.cumsum(equal) <= number)
    return tl.max(tl.where(is_before, at, -1))


@triton.jit
def _kept(row, at, top, scale, value, cut, least, VOCABULARY: tl.constexpr):
    """Weights of the tokens ``at``; 0 for excluded tokens."""
    x = _logits(row, at, VOCABULARY)
    weights = _weights(x, top, scale)
    stays = ((x > value) | ((x == value) & (at <= cut))) & (weights >= least)
    return tl.where(stays, weights, 0.0)


@triton.jit
def _pick(
    row,
    top,
    scale,
    value,
    cut,
    least,
    number,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The first token at which the cumulative weights exceed ``number`` of their sum.

    It always has positive weight, despite rounding; -1 if there is none.
    """
    at = tl.arange(0, BLOCK)
    index = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        weights = _kept(row, start + at, top, scale, value, cut, least, VOCABULARY)
        sums = tl.where(index == start // BLOCK, tl.sum(weights), sums)
    # A scan may add in any order, so rounding may raise a sum even if nothing was added.
    cumulative = tl.cumsum(sums.to(tl.float64))
    target = number.to(tl.float64) * tl.max(cumulative)
    block = tl.min(tl.where((cumulative > target) & (sums > 0), index, BLOCKS))
    before = tl.sum(tl.where(index < block, sums, 0.0).to(tl.float64))
    at += block * BLOCK
    weights = _kept(row, at, top, scale, value, cut, least, VOCABULARY)
    reached = before + tl.cumsum(weights.to(tl.float64))
    # The block's sums in another order may end just below the target: then take its last token.
    first = tl.min(tl.where((reached > target) & (weights > 0), at, VOCABULARY))
    last = tl.max(tl.where(weights > 0, at, -1))
    return tl.where(first < VOCABULARY, first, last)
