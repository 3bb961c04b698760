"""The cells on the real engine: what is asked for, and how a cell's figures read."""

from rich.console import Console

from perf.goodput.rows import POLICIES, asks_of, cell_of
from perf.load.cells import mixes
from perf.load.open_loop import Result, StreamRequest
from perf.load.outcomes import Turn, show_cells

MIXES = {mix.name: mix for mix in mixes(18.0)}


def test_chats_come_as_the_cell_says_and_state_no_length() -> None:
    mix = MIXES["flood"]
    asks, again = (asks_of(mix, 4.0, 1, "demo") for _ in range(2))
    assert asks == again
    wishes = mix.wishes(4.0, 1)
    assert [ask.at_s for ask in asks] == [wish.at_s for wish in wishes]
    assert [ask.body["tenant"] for ask in asks] == [wish.tenant for wish in wishes]
    assert {ask.body["max_tokens"] for ask in asks} == {512}
    batch = asks_of(MIXES["batch"], 4.0, 1, "demo")
    assert {ask.body["priority"] for ask in batch} == {"batch", "interactive"}
    longest = max(
        len(str(ask.body["messages"])) for ask in asks_of(MIXES["long-prompts"], 4.0, 1, "demo")
    )
    assert longest > 4000


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
        found = [(w.at_s, w.deadline_ms, w.answer_tokens) for w in slower.wishes(16.0, 1)]
        meant = [(2 * w.at_s, 2 * w.deadline_ms, w.answer_tokens) for w in mix.wishes(8.0, 1)]
        assert found == meant
