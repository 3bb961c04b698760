import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.sampling import Sampler, SamplingRows, uniforms

CPU = torch.device("cpu")
EOS = 2


def rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    position: int | None = None,
    logprobs: int = -1,
    bars_eos: bool = False,
) -> SamplingRows:
    """Rows that differ in nothing but their position, which counts up from 0 unless given."""
    return SamplingRows(
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k),
        top_p=np.full(count, top_p, np.float32),
        seed=np.full(count, seed, np.uint64),
        position=np.arange(count) if position is None else np.full(count, position),
        logprobs=np.full(count, logprobs),
        bars_eos=np.full(count, bars_eos),
    )


def join(parts: list[SamplingRows]) -> SamplingRows:
    return SamplingRows(
        *(np.concatenate([getattr(p, f) for p in parts]) for f in SamplingRows.__slots__)
    )


def sample(logits: torch.Tensor, params: SamplingRows) -> list[int]:
    return Sampler((EOS,), CPU).sample(logits.clone(), params).ids


def frequencies(logits: torch.Tensor, count: int, **params: float) -> np.ndarray:
    ids = sample(logits.expand(count, -1), rows(count, **params))  # type: ignore[arg-type]
    return np.bincount(ids, minlength=logits.shape[-1])


def chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic over the degrees of freedom: about 1 when they agree."""
    expected = probabilities * observed.sum()
    used = expected > 0
    assert not observed[~used].any(), "a token of no probability was drawn"
    terms = (observed[used] - expected[used]) ** 2 / expected[used]
    return float(terms.sum() / max(1, used.sum() - 1))


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


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """WK-8: temperature."""
    logits = torch.linspace(-2, 2, 12)
    expected = (logits / temperature).softmax(0).numpy()
    counts = frequencies(logits, 30_000, temperature=temperature)
    assert chi_square(counts, expected) < 2.2


@pytest.mark.parametrize(
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
    ],
)
def test_filters_keep_the_likely_tokens(params: dict[str, float], kept: range | list[int]) -> None:
    """WK-8: top_k, then top_p."""
    logits = torch.linspace(-2, 2, 12)
    probabilities = logits.softmax(0).numpy()
    expected = np.zeros(12)
    expected[list(kept)] = probabilities[list(kept)]
    counts = frequencies(logits, 20_000, **params)
    assert chi_square(counts, expected / expected.sum()) < 2.4


def test_of_equal_tokens_at_the_edge_the_first_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert set(np.flatnonzero(frequencies(logits, 500, top_k=2))) == {1, 2}
    assert set(np.flatnonzero(frequencies(logits, 500, top_k=1))) == {1}


def test_temperature_zero_is_greedy() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    assert sample(logits, rows(6, temperature=0.0)) == logits.argmax(-1).tolist()


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 5, 40]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 5000),
        "bars_eos": st.booleans(),
        "logprobs": st.sampled_from([-1, 0, 3]),
    }
)


@given(batch=st.lists(parameters, min_size=2, max_size=6), data=st.data())
def test_a_draw_does_not_depend_on_the_batch(
    batch: list[dict[str, float]], data: st.DataObject
) -> None:
    """WK-3."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(batch), 60, generator=generator) * 3
    parts = [rows(1, **params) for params in batch]  # type: ignore[arg-type]
    together = sample(logits, join(parts))
    assert together == [sample(logits[i : i + 1], part)[0] for i, part in enumerate(parts)]


def test_end_of_sequence_is_barred_before_min_tokens() -> None:
    logits = torch.zeros(2, 5)
    logits[:, EOS] = 50.0
    logits[:, 4] = 1.0
    params = join(
        [rows(1, temperature=0.0, bars_eos=True), rows(1, temperature=0.0, bars_eos=False)]
    )
    assert sample(logits, params) == [4, EOS]
    assert EOS not in sample(logits.expand(2, -1), rows(2, bars_eos=True))


def test_logprobs_are_the_model_s_own() -> None:
    """Of the chosen token and the most likely ones, before temperature and masks."""
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    params = join(
        [
            rows(1, logprobs=2, temperature=3.0, top_k=1),
            rows(1, logprobs=-1),
            rows(1, logprobs=0, temperature=0.0),
        ]
    )
    sampled = Sampler((EOS,), CPU).sample(logits.clone(), params)
    assert sampled.logprobs is not None
    first, second, third = sampled.logprobs
    assert second is None
    assert first is not None
    assert third is not None
    assert first.logprob == pytest.approx(float(expected[0].max()))
    top = expected[0].topk(2)
    assert first.top == [
        (int(i), pytest.approx(float(v))) for i, v in zip(top.indices, top.values, strict=True)
    ]
    assert third.logprob == pytest.approx(float(expected[2, sampled.ids[2]]))
    assert third.top == []


def test_a_broken_model_s_logits_do_not_make_ids_up() -> None:
    logits = torch.full((2, 8), torch.nan)
    assert all(0 <= i < 8 for i in sample(logits, rows(2, top_p=0.5)))
    assert all(0 <= i < 8 for i in sample(logits, rows(2)))
