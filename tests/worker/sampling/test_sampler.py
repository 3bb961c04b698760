from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import Sampling, TokenLogprob
from tests.support.cases import for_each
from worker.core import Job
from worker.sampling.sampler import NO_TOKEN, Sampler, uniforms
from worker.scheduler.request import Request

CPU = torch.device("cpu")
EOS = 2


@dataclass(frozen=True)
class Row:
    """One row of a step: its parameters, and where in its text the new token comes."""

    sampling: Sampling
    seed: int = 1
    position: int = 0
    bars_eos: bool = False


def row(
    *, position: int = 0, seed: int = 1, bars_eos: bool = False, logprobs: int = -1, **params: float
) -> Row:
    asked = Sampling(1, logprobs=None if logprobs < 0 else logprobs, **params)  # type: ignore[arg-type]
    return Row(asked, seed, position, bars_eos)


def rows(count: int, **params: float) -> list[Row]:
    """Rows that differ in nothing but their position."""
    return [row(position=i, **params) for i in range(count)]  # type: ignore[arg-type]


def sampled(logits: torch.Tensor, batch: list[Row]) -> tuple[list[int], list[TokenLogprob | None]]:
    sampler = Sampler((EOS,), CPU, slots=len(batch), vocab_size=logits.shape[-1], max_tokens=8)
    for slot, each in enumerate(batch):
        request = Request(Job([], each.sampling, 0.0), submitted_at=0.0, own_seed=each.seed)
        sampler.begin(slot, request)
        if each.bars_eos:
            sampler._table.first_free_position[slot] = each.position + 1
    positions = np.array([each.position for each in batch])
    nothing = torch.zeros(len(batch), dtype=torch.int64)
    step = sampler.sample(logits.clone(), np.arange(len(batch)), positions, nothing)
    ids, logprobs = step.read()
    return ids, logprobs or [None] * len(batch)


def sample(logits: torch.Tensor, batch: list[Row]) -> list[int]:
    return sampled(logits, batch)[0]


def frequencies(logits: torch.Tensor, count: int, **params: float) -> np.ndarray:
    ids = sample(logits.expand(count, -1), rows(count, **params))
    return np.bincount(ids, minlength=logits.shape[-1])


def chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic over the degrees of freedom: about 1 when they agree."""
    expected = probabilities * observed.sum()
    used = expected > 0
    assert not observed[~used].any(), "a token of no probability was drawn"
    terms = (observed[used] - expected[used]) ** 2 / expected[used]
    return float(terms.sum() / max(1, used.sum() - 1))


WAYS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"top_p": 0.5},
    {"top_k": 3, "min_p": 0.1},
]


@for_each("bad", [torch.nan, torch.inf])
@for_each("at", [0, 17, 99, slice(None)])
def test_a_row_that_is_not_finite_gets_no_token(at: int | slice, bad: float) -> None:
    """WK-12: however its token would be chosen; and the other rows get theirs."""
    logits = torch.randn(2 * len(WAYS), 100)
    batch = [row(**way) for way in WAYS for _ in range(2)]  # type: ignore[arg-type]
    expected = sample(logits, batch)
    broken = logits.clone()
    broken[::2, at] = bad
    ids = sample(broken, batch)
    assert ids[::2] == [NO_TOKEN] * len(WAYS) and ids[1::2] == expected[1::2]
    for way in WAYS:
        alone = row(**way)  # type: ignore[arg-type]
        assert sample(broken[:1], [alone]) == [NO_TOKEN]


def test_what_is_barred_by_minus_infinity_is_finite() -> None:
    """WK-12: the model's own mask, or ours; only a row of nothing else is none."""
    logits = torch.full((2, 100), -torch.inf)
    logits[0, [EOS, 41]] = 1.0
    for temperature in (0.0, 1.0):
        batch = [row(temperature=temperature, bars_eos=True), row(temperature=temperature)]
        assert sample(logits, batch) == [41, NO_TOKEN]


def test_uniforms_are_uniform_and_below_one() -> None:
    draws = uniforms(np.full(100_000, 9, np.uint64), np.arange(100_000))
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert chi_square(counts, np.full(50, 1 / 50)) < 1.6
    pairs = np.histogram2d(draws[:-1], draws[1:], bins=7)[0].ravel()
    assert chi_square(pairs, np.full(49, 1 / 49)) < 1.6


def test_neighbouring_seeds_are_unrelated() -> None:
    draws = uniforms(np.arange(50_000, dtype=np.uint64), np.zeros(50_000, np.int64))
    assert chi_square(np.histogram(draws, bins=50, range=(0, 1))[0], np.full(50, 0.02)) < 1.6


@for_each("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """WK-8: temperature."""
    logits = torch.linspace(-2, 2, 12)
    expected = (logits / temperature).softmax(0).numpy()
    counts = frequencies(logits, 6_000, temperature=temperature)
    assert chi_square(counts, expected) < 2.2


@for_each(
    ("params", "kept"),
    [
        ({"top_k": 3}, [9, 10, 11]),
        ({"top_k": 1}, [11]),
        ({"top_k": 500}, range(12)),
        ({"top_k": -1}, range(12)),
        ({"top_p": 0.29}, [11]),
        ({"top_p": 0.31}, [10, 11]),
        ({"top_p": 1e-6}, [11]),
        ({"top_k": 3, "top_p": 0.5}, [10, 11]),  # the share is of the three, as renormalised
        ({"min_p": 0.4}, [9, 10, 11]),  # each is 0.695 times as likely as the next
        ({"min_p": 1.0}, [11]),
    ],
)
def test_filters_keep_the_likely_tokens(params: dict[str, float], kept: range | list[int]) -> None:
    """WK-8: top_k, then top_p; min_p."""
    logits = torch.linspace(-2, 2, 12)
    probabilities = logits.softmax(0).numpy()
    expected = np.zeros(12)
    expected[list(kept)] = probabilities[list(kept)]
    counts = frequencies(logits, 3_000, **params)
    assert chi_square(counts, expected / expected.sum()) < 2.4


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 5, 40, 65, 80]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "logit_bias": st.sampled_from([(), ((3, 2.0),), ((5, -9.0), (0, 4.0))]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 5000),
        "bars_eos": st.booleans(),
        "logprobs": st.sampled_from([-1, 0, 3]),
    }
)


@settings(deadline=None)  # the first draw compiles
@given(batch=st.lists(parameters, min_size=2, max_size=6), data=st.data())
def test_a_draw_does_not_depend_on_the_batch(
    batch: list[dict[str, float]], data: st.DataObject
) -> None:
    """WK-3."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(batch), 90, generator=generator) * 3
    parts = [row(**params) for params in batch]  # type: ignore[arg-type]
    together = sample(logits, parts)
    assert together == [sample(logits[i : i + 1], [part])[0] for i, part in enumerate(parts)]


def test_end_of_sequence_is_barred_before_min_tokens() -> None:
    logits = torch.zeros(2, 5)
    logits[:, EOS] = 50.0
    logits[:, 4] = 1.0
    params = [row(temperature=0.0, bars_eos=True), row(temperature=0.0)]
    assert sample(logits, params) == [4, EOS]
    assert EOS not in sample(logits, rows(2, bars_eos=True))


def test_logprobs_are_the_model_s_own() -> None:
    """Of the chosen token and the most likely ones, before temperature and masks."""
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    params = [
        row(logprobs=2, temperature=3.0, top_k=1, logit_bias=((4, 50.0),)),
        row(),
        row(logprobs=0, temperature=0.0),
    ]
    ids, (first, second, third) = sampled(logits, params)
    assert ids[0] == 4
    assert second is None
    assert first is not None
    assert third is not None
    assert first.logprob == pytest.approx(float(expected[0, 4]))
    top = expected[0].topk(2)
    assert first.top == [
        (int(i), pytest.approx(float(v))) for i, v in zip(top.indices, top.values, strict=True)
    ]
    assert third.logprob == pytest.approx(float(expected[2, ids[2]]))
    assert third.top == []


@for_each("temperature", [0.0, 2.0])
def test_ranks_count_what_is_at_least_as_likely(temperature: float) -> None:
    """As vLLM's (``vllm/v1/sample``), before temperature and biases; the token itself counts."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(20, 50, generator=generator).mul(4).round().div(4)  # many are equal
    expected = logits.log_softmax(-1)
    params = [
        row(logprobs=i % 3, temperature=temperature, logit_bias=((i + 3, 80.0),), position=i)
        for i in range(19)
    ]
    ids, found = sampled(logits, [*params, row()])
    assert ids[:19] == list(range(3, 22))
    assert found[19] is None
    told = [one.rank for one in found if one is not None]
    assert told == [
        sum(value >= logprobs[chosen] for value in logprobs)
        for chosen, logprobs in zip(ids[:19], expected.tolist(), strict=False)
    ]
    assert max(told) > 5
