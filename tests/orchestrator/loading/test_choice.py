"""Which instance gives its model up: least harm, then what was needed longest ago."""

import math

from orchestrator.loading.choice import LoadPlace, SwapCost, choose_place
from tests.support.cases import for_each


def place(address: str, **changes: object) -> LoadPlace:
    values: dict[str, object] = {
        "load_ms": 1000.0,
        "is_spare": False,
        "running": 0,
        "waiting": 0,
        "drain_ms": 0.0,
        "resident_s": 100.0,
        "unneeded_s": 10.0,
    }
    return LoadPlace(address=address, **(values | changes))  # type: ignore[arg-type]


def chosen(*places: LoadPlace, min_residency_s: float = 10.0) -> str | None:
    choice = choose_place(places, min_residency_s)
    return None if choice.place is None else choice.place.address


@for_each(
    ("places", "goes"),
    [
        ([{"waiting": 1, "unneeded_s": 900.0}, {"running": 1}, {"unneeded_s": 1.0}], 2),  # idle
        ([{"waiting": 1, "unneeded_s": 900.0}, {"running": 1}], 1),
        ([{"waiting": 1}], 0),  # nothing else is left
        ([{"unneeded_s": 1.0}, {"unneeded_s": 60.0}], 1),  # needed longest ago
        ([{"waiting": 9, "unneeded_s": 60.0}, {"waiting": 1, "unneeded_s": 20.0}], 1),
        ([{"drain_ms": 500.0}, {}], 1),  # ready first
    ],
)
def test_the_model_that_does_least_harm_goes(places: list[dict[str, object]], goes: int) -> None:
    assert chosen(*(place(str(at), **each) for at, each in enumerate(places))) == str(goes)


def test_work_that_another_instance_can_do_is_no_harm() -> None:
    assert place("spare", waiting=5, is_spare=True).cost is SwapCost.NONE
    assert place("spare", waiting=5, running=1, is_spare=True).cost is SwapCost.DRAIN


def test_a_model_with_work_stays_for_a_while_and_an_idle_one_need_not() -> None:
    young = place("young", running=1, resident_s=4.0)
    assert choose_place([young], 10.0).wait_s == 6.0
    assert chosen(young, min_residency_s=2.0) == "young"
    assert chosen(place("idle", resident_s=0.1)) == "idle"


def test_or24_an_idle_model_of_others_goes_when_it_is_the_askers_turn() -> None:
    theirs = place("theirs", is_others=True)
    assert choose_place([theirs], 10.0, turn_in_s=3.0).wait_s == 3.0
    assert choose_place([theirs, place("own")], 10.0, turn_in_s=3.0).place == place("own")
    assert choose_place([theirs], 10.0, turn_in_s=-1.0).place == theirs


def test_without_an_instance_there_is_nothing_to_wait_for_by_the_clock() -> None:
    choice = choose_place([], 10.0)
    assert choice.place is None and choice.wait_s == math.inf
