"""The cells on the real engine: what is asked for, and how a cell's figures read."""

import pytest
from rich.console import Console

from perf.goodput.rows import POLICIES, Requests, cell_of
from perf.load.cells import mixes
from perf.load.open_loop import Result, StreamRequest
from perf.load.outcomes import Turn, show_cells
from tests.support.fake_worker import make_card
from worker.runner.synthetic import length_ids

MIXES = {mix.name: mix for mix in mixes(18.0)}


CARD = make_card()


@pytest.mark.parametrize("timed", [False, True])
def test_requests_come_as_the_cell_says_and_state_no_length(timed: bool) -> None:
    served, mix = Requests(CARD, timed), MIXES["flood"]
    asks, wishes = served.asks(mix, 4.0, 1), mix.requests(4.0, 1)
    assert [ask.at_s for ask in asks] == [wish.at_s for wish in wishes]
    assert [ask.body["tenant"] for ask in asks] == [wish.tenant for wish in wishes]
    assert {ask.body["max_tokens"] for ask in asks} == {512}
    assert not any(ask.body.get("ignore_eos") for ask in asks)
    batch = served.asks(MIXES["batch"], 4.0, 1)
    assert {ask.body["priority"] for ask in batch} == {"batch", "interactive"}


def test_chats_are_the_same_for_a_seed_and_some_are_long() -> None:
    served = Requests(CARD)
    assert served.asks(MIXES["flood"], 4.0, 1) == served.asks(MIXES["flood"], 4.0, 1)
    long = served.asks(MIXES["long-prompts"], 4.0, 1)
    assert max(len(str(ask.body["messages"])) for ask in long) > 4000


def test_prompts_of_a_timed_engine_begin_as_their_kind_and_end_with_the_length() -> None:
    mix = MIXES["long-prompts"]
    openings = set()
    for wish, ask in zip(mix.requests(4.0, 1), Requests(CARD, True).asks(mix, 4.0, 1), strict=True):
        prompt = ask.body["prompt"]
        assert isinstance(prompt, list) and len(prompt) == wish.prompt_tokens
        assert tuple(prompt[-2:]) == length_ids(wish.answer_tokens)
        openings.add((wish.kind, *prompt[:8]))
    assert len(openings) == 2 and len({opening[1:] for opening in openings}) == 2


def test_a_cell_s_figures_are_medians_over_seeds() -> None:
    policy, _ = POLICIES[0]
    ask = StreamRequest(0.0, 100.0, {})
    kept = Result(status=200, end_s=0.05, tokens=30, complete=True, finish="stop")
    late = Result(status=200, end_s=0.15, tokens=10, complete=True, finish="stop")
    turns = [
        Turn(
            [(ask, kept)] * met + [(ask, late)] * (10 - met),
            window_s=2.0,
            kinds=["small", *["big"] * 8, "small"],
        )
        for met in (4, 5, 6)
    ]
    cell = cell_of(MIXES["flood"], policy, turns)
    show_cells([cell], Console(quiet=True))
    figures = {figure.key: figure for figure in cell.figures()}
    met = figures["flood.ours.attainment"]
    assert (met.median, met.low, met.high, met.n) == (0.5, 0.4, 0.6, 3)
    assert figures["flood.ours.attainment_small"].median == 0.5
    assert figures["flood.ours.met_per_s"].median == 2.5
    assert figures["flood.ours.waste"].median == 0.25
    assert figures["flood.ours.tokens_per_s"].median == 100.0
    assert len({policy.name for policy, _ in POLICIES}) == 4


def test_a_cell_is_fitted_to_a_slower_machine() -> None:
    """Half of the speed: the same requests, each with twice the time, half as many a second."""
    for mix in MIXES.values():
        slower = mix.stretched(2.0)
        assert slower.per_s == mix.per_s / 2
        found = [(w.at_s, w.deadline_ms, w.answer_tokens) for w in slower.requests(16.0, 1)]
        meant = [(2 * w.at_s, 2 * w.deadline_ms, w.answer_tokens) for w in mix.requests(8.0, 1)]
        assert found == meant
