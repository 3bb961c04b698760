"""Clips played ahead: the worker's own rules, by the rates that it tells."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clips.dispatch.fleet import ClipInstance
from clips.dispatch.forecast import (
    NOMINAL_ABILITY,
    Ability,
    Begun,
    ClipNeeds,
    InstanceTimeline,
    forecast,
)
from clips.plan.budgets import ClipStage
from clips.plan.recipe import read_recipe
from clips.state import ClipsState

NOW = 100.0


def ability(
    audio: float = 1.0, image: float = 0.0, video: float = 0.0, clip: float = 0.0, **more: Any
) -> Ability:
    """Of an instance that takes so long for all of a stage of ``needs``'s."""
    units = needs(1e9).whole(NOMINAL_ABILITY).units
    all_s = dict(zip(ClipStage, (audio, image, video, clip), strict=True))
    rates = {stage: all_s[stage] / units[stage] for stage in ClipStage}
    return Ability(rates, buffer_s=1.0, **more)


def needs(left_s: float, *, degrade: bool = False, **recipe: Any) -> ClipNeeds:
    known = {"schema": "1.1", "text": "Good morning to everybody here."} | recipe
    return ClipNeeds(read_recipe(known), NOW + left_s, degrade=degrade)


def test_a_latest_start_is_computed_once_for_reports_of_the_same_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All clips that wait are put in order at each change, for each instance (LB-1)."""
    instance, want = ClipInstance("a"), needs(100)
    state = ClipsState(512, 45.0, 1.0, 2, 2, waiting=0, max_waiting=8, free_in_s=(), stages={})
    instance.take_state(state, NOW)
    start_by = want.start_by(instance.ability)
    instance.take_state(msgspec.structs.replace(state, slots_free=1), NOW)
    monkeypatch.setattr(Ability, "work", None)
    assert want.start_by(instance.ability) == start_by
    assert want.by(NOW + 101).start_by(instance.ability) == start_by + 1


def test_what_is_under_way_counts_for_what_is_left_of_it() -> None:
    can = ability(2, 2, 4, 0, slots=1)
    want = needs(100)
    plan = want.whole(can)
    work = can.work(plan)
    half = Begun(plan, {"audio": 100, "image": 100, "video": 50})
    assert InstanceTimeline(can, NOW, [half]).free_at == pytest.approx(NOW + 2)
    assert InstanceTimeline(can, NOW, [half]).finish(work) == pytest.approx(NOW + 2 + 6)
    assert InstanceTimeline(can, NOW, (), [1.5]).free_at == pytest.approx(NOW + 1.5), (
        "somebody else's"
    )


@given(st.lists(st.floats(0.5, 60), max_size=12), st.integers(1, 3), st.booleans())
def test_nothing_that_is_said_to_be_in_time_is_late(
    left: list[float], slots: int, degrade: bool
) -> None:
    can = ability(1, 2, 3, 0.5, slots=slots)
    all_needs = [needs(s, degrade=degrade) for s in sorted(left)]
    lines = {"a": InstanceTimeline(can, NOW, ()), "b": InstanceTimeline(can, NOW, ())}
    busy: dict[str, float] = {"a": 0.0, "b": 0.0}
    for want, found in zip(all_needs, forecast(all_needs, lines), strict=True):
        assert found is not None
        assert found.is_in_time == (found.finish_at <= want.due_at(can))
        if found.is_in_time:
            busy[found.address] += can.work(found.plan)[ClipStage.VIDEO]
            # A stage serves one clip at a time: what it did by then fits before it.
            assert busy[found.address] <= found.finish_at - NOW + 1e-6
