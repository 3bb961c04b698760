"""DL-7, DL-15: the schedule played forward."""

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.prediction.forecast import Asked, play
from tests.support.cases import for_each
from tests.support.paces import machine_of

ROWS_8 = machine_of(base_ms=5.0, row_ms=0.5, rows=8)


def asked(key: int, tokens: float, **rest: float) -> Asked:
    own = dict.fromkeys(("stop_ms", "whole_ms", "first_ms", "gap_ms"), inf)
    own |= {"prompt_ms": 0.0, "prompt_steps": 1, "context_tokens": 0} | rest
    return Asked(key=key, left=(tokens,), **own)  # type: ignore[arg-type]


def test_one_alone_takes_its_prompt_and_its_steps() -> None:
    played = play([asked(1, 100, prompt_ms=30.0)], ROWS_8)
    assert played.start_ms == pytest.approx(0.0)
    assert played.first_ms == pytest.approx(30.0 + 5.5)
    assert played.end_ms == pytest.approx(30.0 + 100 * 5.5)


def test_rows_slow_each_other_and_speed_up_as_they_end() -> None:
    played = play([asked(1, 50), asked(2, 100)], ROWS_8)
    assert played.end_ms[:, 0] == pytest.approx(50 * 6.0)
    assert played.end_ms[:, 1] == pytest.approx(50 * 6.0 + 50 * 5.5)


def test_long_contexts_slow_every_row() -> None:
    """By what is read on average: contexts grow, and leave with their rows."""
    machine = ROWS_8._replace(context_token_ms=0.01)
    long = asked(1, 50, context_tokens=1000)
    played = play([long, asked(2, 100, context_tokens=200)], machine)
    both = 50 * (6.0 + 0.01 * (1000 + 25 + 200 + 50))
    assert played.end_ms[:, 0] == pytest.approx(both)
    assert played.end_ms[:, 1] == pytest.approx(both + 50 * (5.5 + 0.01 * (200 + 50)))
    two = play([long, long], machine._replace(rows=16, instances=2))
    assert two.end_ms == pytest.approx(50 * (5.5 + 0.01 * (1000 + 25))), "each reads its own"


def test_what_comes_behind_all_rows_starts_when_the_first_is_free() -> None:
    machine = machine_of(5.0, 0.5, rows=2)
    played = play([asked(1, 50), asked(2, 100), asked(3, 10), asked(4, 10)], machine)
    assert played.start_ms[:, 2] == pytest.approx(50 * 6.0)
    assert played.start_ms[:, 3] == pytest.approx(60 * 6.0)


def test_a_prompt_holds_up_all_of_its_instance() -> None:
    long = asked(2, 10, prompt_ms=100.0)
    one = play([asked(1, 50), long], ROWS_8)
    two = play([asked(1, 50), long], machine_of(5.0, 0.5, rows=16, instances=2))
    alone = 10 * 6.0 + 40 * 5.5
    assert one.end_ms[:, 0] == pytest.approx(alone + 100.0)
    assert two.end_ms[:, 0] == pytest.approx(50 * 5.5 + 50.0), "half of the time it is the other's"
    assert (two.first_ms[:, 1] >= 100.0).all(), "its own waits for all of it"


def test_what_is_cut_at_its_deadline_leaves_its_row_then() -> None:
    machine = machine_of(5.0, 0.5, rows=1)
    played = play([asked(1, 1000, stop_ms=110.0, whole_ms=110.0), asked(2, 10)], machine)
    chances = played.chances([asked(1, 1000, whole_ms=110.0), asked(2, 10)])
    assert chances.tolist() == [0.0, 1.0]
    assert played.start_ms[:, 1] == pytest.approx(110.0)


@for_each(
    ("stated", "chance"),
    [
        ({"whole_ms": 551.0}, 1.0),
        ({"whole_ms": 549.0}, 0.0),
        ({"first_ms": 36.0}, 1.0),
        ({"first_ms": 35.0, "whole_ms": 10_000.0}, 0.0),
        ({"first_ms": 100.0, "gap_ms": 5.5}, 1.0),
        ({"first_ms": 100.0, "gap_ms": 4.0}, 0.0),
    ],
)
def test_dl14_every_stated_part_counts(stated: dict[str, float], chance: float) -> None:
    if "gap_ms" in stated or "first_ms" in stated:
        one = asked(1, 100, prompt_ms=30.0, **stated)
    else:
        one = asked(1, 100, **stated)
    assert play([one], ROWS_8).chances([one]).tolist() == [chance]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(1, 500), st.floats(0, 50)), min_size=1),
    st.integers(1, 6),
    st.floats(0, 0.5),
)
def test_more_ahead_never_means_sooner(
    ahead: list[tuple[int, float, float]], rows: int, spread: float
) -> None:
    machine = machine_of(5.0, 0.2, rows, spread=spread)
    own = asked(1, 20, prompt_ms=10.0)
    line = [asked(key, tokens, prompt_ms=prompt) for key, tokens, prompt in ahead]
    starts = [
        np.sort(play([*line[:count], own], machine).start_ms[:, count])
        for count in range(len(line) + 1)
    ]
    assert all((later >= sooner - 1e-6).all() for sooner, later in pairwise(starts))
