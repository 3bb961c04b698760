"""The ``triton`` draws against float64: compiled on CUDA, else under triton's interpreter.

As in ``attention/test_triton.py``, which says why.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protocol import Sampling
from tests.support import draws
from tests.support.cases import for_each
from tests.support.draws import KINDS, Way, kept_of
from tests.support.triton_tests import DEVICE, INTERPRETED, NEEDS_TRITON, sound_interpreter
from worker.core import Job
from worker.sampling.sampler import Sampler, draw_plain, likeliest
from worker.scheduler.request import Request

BLOCK = 128 if INTERPRETED else 1024
VOCABULARY = 5 * BLOCK + 27
SPOILT = 7
"""Id that a row has when nothing can be drawn."""

__all__ = ["sound_interpreter"]
pytestmark = NEEDS_TRITON
if INTERPRETED or torch.cuda.is_available():
    pytest.importorskip("triton")
    from worker.sampling import triton_draws
    from worker.sampling.triton_draws import draw_rows


def drawn(logits: NDArray[np.float32], ways: list[Way], chosen: int = SPOILT) -> list[int]:
    """Tokens of ``logits`` [rows, vocabulary], or of the one row that they all have."""
    rows = np.broadcast_to(logits, (len(ways), logits.shape[-1])).copy()
    chances = torch.from_numpy(np.array(ways, np.float32).T.copy()).to(DEVICE)
    given = torch.full((len(ways),), chosen, device=DEVICE)
    found: list[int] = draw_rows(
        torch.from_numpy(rows).to(DEVICE), given, chances, block=BLOCK
    ).tolist()
    return found


def check(logits: NDArray[np.float32], ways: list[Way]) -> None:
    """Every token is one that is kept, and its share of the distribution holds the number."""
    for way, token in zip(ways, drawn(logits, ways), strict=True):
        # float32 rounds weights to one side of ``min_p`` that are next to it on the other.
        kept, most = (kept_of(logits, way._replace(min_p=way.min_p * f)) for f in (1, 1 - 1e-6))
        shares = kept.cumsum() / kept.sum()
        slack = 1e-5 + (most.sum() - kept.sum()) / kept.sum()
        assert most[token] > 0, (way, token)
        assert shares[token] > way.number - slack, (way, token)
        assert shares[token] - kept[token] / kept.sum() < way.number + slack, (way, token)


def logits_of(kind: str) -> NDArray[np.float32]:
    return draws.logits_of(kind, VOCABULARY, BLOCK)


FILTERS = [
    Way(),
    Way(min_p=0.3),
    Way(min_p=1.0),
    Way(top_k=1),
    Way(top_k=40),
    Way(top_k=VOCABULARY - 1),
    Way(top_k=VOCABULARY, top_p=0.7, min_p=0.02),
    Way(top_p=0.9),
    Way(top_p=1e-6),
    Way(top_p=0.0),
    Way(top_p=0.999999),
    Way(top_k=30, top_p=0.5),
    Way(top_k=300, top_p=0.99, heat=2.5),
    Way(heat=1e-5),
    Way(heat=10.0, top_p=0.3),
]


@for_each("kind", KINDS)
def test_draws_are_those_of_the_definition(kind: str) -> None:
    """WK-8."""
    # The interpreter takes a tenth of a second for a row.
    ways = FILTERS[KINDS.index(kind) % 3 :: 3] if INTERPRETED else FILTERS
    numbers = np.random.default_rng(3).random(len(ways), np.float32).tolist()
    check(logits_of(kind), [way._replace(number=n) for way, n in zip(ways, numbers, strict=True)])


@for_each("kind", KINDS)
def test_no_token_more_or_less_is_kept(kind: str) -> None:
    """With descending logits the number before 1 draws the last token that is kept."""
    logits = -np.sort(-logits_of(kind))
    # So hot that the last one has a share that a number of 24 bits can hit.
    edges = [Way(4.0, top_k=90), Way(4.0, top_p=0.6), Way(4.0, top_k=200, top_p=0.6)]
    expected = [np.flatnonzero(kept_of(logits, way)).max() for way in edges]
    assert drawn(logits, [way._replace(number=1 - 2**-24) for way in edges]) == expected


def test_a_number_near_one_picks_a_token_of_positive_weight() -> None:
    logits = logits_of("barred")
    nearly = 1 - 2**-24
    assert drawn(logits, [Way(number=nearly), Way(number=nearly, top_k=2)]) == [500, 17]
    logits[VOCABULARY - 1] = 0.5
    assert drawn(logits, [Way(number=nearly)]) == [VOCABULARY - 1]
    assert drawn(logits, [Way(number=0.0)]) == [5]


def test_rows_that_nothing_is_drawn_from_have_the_given_id() -> None:
    logits = logits_of("flat")
    assert drawn(logits, [Way(heat=0.0), Way(heat=0.0, top_p=0.5)], chosen=3) == [3, 3]
    assert drawn(logits, [Way(), Way(top_k=4, top_p=0.5)], chosen=-1) == [-1, -1]
    for bad in (np.nan, np.inf):
        for place in (0, 70, VOCABULARY - 1, slice(None)):
            broken = logits.copy()
            broken[place] = bad
            assert drawn(broken, [Way(), Way(top_k=4, top_p=0.5)]) == [SPOILT, SPOILT]
    nothing = np.full(VOCABULARY, -np.inf, np.float32)
    assert drawn(nothing, [Way(), Way(top_k=4, top_p=0.5)]) == [SPOILT, SPOILT]


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """WK-3."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((3, VOCABULARY)).astype(np.float32) * 3
    ways = [way._replace(number=float(rng.random(dtype=np.float32))) for way in FILTERS[4::4]]
    together = drawn(logits, ways)
    assert together == [drawn(logits[i], [way])[0] for i, way in enumerate(ways)]
    assert together[::-1] == drawn(logits[::-1], ways[::-1])


def test_a_sampler_draws_the_same_recorded_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recording replays, and what a step launches."""
    generator = torch.Generator().manual_seed(8)
    logits = 3 * torch.randn(5, VOCABULARY, generator=generator)
    asked = [
        Sampling(1, temperature=0.7),
        Sampling(1, temperature=1.0, top_k=20),
        Sampling(1, temperature=0.0),
        Sampling(1, temperature=1.5, top_p=0.8, min_p=0.01),
        Sampling(1, temperature=0.9, top_k=400, top_p=0.9),
    ]
    slots, positions = np.arange(5), np.full(5, 3)
    monkeypatch.setattr("worker.sampling.sampler._kernels_for", lambda device: triton_draws)
    sampler = Sampler((), DEVICE, slots=5, vocab_size=VOCABULARY, max_tokens=8)
    sampler.compile_draws()
    for slot, sampling in enumerate(asked):
        request = Request(Job([], sampling, 0.0), submitted_at=0.0, own_seed=slot)
        sampler.begin(slot, request)
    chances = sampler.plain_chances(slots, positions)
    assert chances is not None
    expected = logits.argmax(dim=-1).tolist()
    for i, chance in enumerate(chances.T.tolist()):
        heat, min_p, number, top_k, top_p = chance
        if heat > 0:
            way = Way(heat, min_p, number, int(top_k), top_p)
            cumulative = kept_of(logits[i].numpy(), way).cumsum()
            expected[i] = int(np.searchsorted(cumulative, way.number * cumulative[-1], "right"))
    there, last_ids = logits.to(DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    assert sampler.sample(there.clone(), slots, positions, last_ids).ids.tolist() == expected
    uploaded = torch.from_numpy(chances).to(DEVICE)
    assert draw_plain(there, likeliest(there), uploaded).tolist() == expected
