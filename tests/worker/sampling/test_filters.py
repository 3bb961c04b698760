"""The filters against the formulas written out, and against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.lazy import transformers
from worker.sampling.filters import candidates

VOCABULARY = 200


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def filtered(
    logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]
) -> torch.Tensor:
    """The logits, -inf where a token cannot be drawn."""
    left = torch.full_like(logits, -torch.inf)
    seen: list[int] = []
    parameters = np.array(top_k), np.array(top_p, np.float32), np.array(min_p, np.float32)
    for rows, weights, ids in candidates(logits, *parameters):
        seen += rows.tolist()
        for i, row in enumerate(rows.tolist()):
            (places,) = weights[i].nonzero(as_tuple=True)
            tokens = places if ids is None else ids[i, places]
            left[row, tokens] = logits[row, tokens]
            expected = (logits[row, tokens] - logits[row].max()).exp()
            torch.testing.assert_close(weights[i, places], expected)
    assert sorted(seen) == list(range(len(logits)))
    return left


def slow_kept(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token by token, from the most likely one on, in double precision."""
    weights = np.exp(logits.double().numpy() - float(logits.max()))
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = order[: top_k if top_k > 0 else len(order)]
    whole, before, kept = sum(weights[i] for i in order), 0.0, set()
    for i in order:
        if kept and before >= top_p * whole and top_p < 1:
            break
        kept.add(i)
        before += weights[i]
    return {i for i in kept if weights[i] >= min_p}


def random_parameters(rows: int, seed: int) -> tuple[list[int], list[float], list[float]]:
    draw = np.random.default_rng(seed)
    return (
        draw.choice([0, -1, 1, 7, 64, 128, 129, 150, 200, 900], rows).tolist(),
        draw.choice([1.0, 0.99, 0.7, 0.3, 0.01], rows).tolist(),
        draw.choice([0.0, 0.0, 0.02, 0.5, 1.0], rows).tolist(),
    )


@pytest.mark.parametrize("seed", range(10))
def test_each_row_keeps_what_the_formula_keeps(seed: int) -> None:
    """WK-8: rows of all kinds in one batch."""
    logits = random_logits(40, seed)
    top_k, top_p, min_p = random_parameters(40, seed)
    left = filtered(logits, top_k, top_p, min_p)
    for i, parameters in enumerate(zip(top_k, top_p, min_p, strict=True)):
        kept = set(torch.isfinite(left[i]).nonzero().squeeze(1).tolist())
        assert kept == slow_kept(logits[i], *parameters), parameters
        assert all(left[i, token] == logits[i, token] for token in kept)


@pytest.mark.parametrize(
    ("name", "parameters", "oracle"),
    [
        ("top_k", [7, 1.0, 0.0], transformers.TopKLogitsWarper(7)),
        ("top_k", [150, 1.0, 0.0], transformers.TopKLogitsWarper(150)),
        ("top_p", [0, 0.8, 0.0], transformers.TopPLogitsWarper(0.8)),
        ("min_p", [0, 1.0, 0.05], transformers.MinPLogitsWarper(0.05)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_each_filter_is_that_of_transformers(
    name: str, parameters: list[float], oracle: transformers.TopKLogitsWarper, seed: int
) -> None:
    logits = random_logits(16, seed + 50)
    top_k, top_p, min_p = ([value] * 16 for value in parameters)
    ours = filtered(logits, top_k, top_p, min_p)  # type: ignore[arg-type]
    theirs = oracle(torch.zeros(16, 1, dtype=torch.int64), logits.clone())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [0.01, 0.5, 3.0])
def test_large_vocabularies(scale: float) -> None:
    """Where the likeliest thousand tokens are enough to decide, and where they are not."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 5000, generator=generator) * scale
    parameters = [0, 0, 0, 1500, 3000, 100], [0.01, 0.3, 0.95, 1.0, 0.8, 0.9], [0.0] * 6
    left = filtered(logits, *parameters)
    for i, one in enumerate(zip(*parameters, strict=True)):
        kept = set(torch.isfinite(left[i]).nonzero().squeeze(1).tolist())
        expected = slow_kept(logits[i], *one)
        # Of thousands of nearly equal tokens, float32 sums may put the edge a token away.
        assert len(kept ^ expected) <= len(expected) // 1000, one


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 3000])
def test_a_row_is_filtered_the_same_in_any_company(vocabulary: int) -> None:
    """WK-3: to the bit."""
    logits = torch.randn(30, vocabulary, generator=torch.Generator().manual_seed(3))
    top_k, top_p, min_p = random_parameters(30, 4)
    together = filtered(logits, top_k, top_p, min_p)
    for i in range(30):
        alone = filtered(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1], min_p[i : i + 1])
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("top_k", [1, 5, 128, 129, 700])
def test_of_many_equals_the_lower_ids_stay(top_k: int) -> None:
    """More equals than the selection looks at: bf16 logits have many."""
    logits = torch.zeros(1, 3000)
    left = filtered(logits, [top_k], [1.0], [0.0])
    assert torch.isfinite(left[0]).nonzero().squeeze(1).tolist() == list(range(top_k))
