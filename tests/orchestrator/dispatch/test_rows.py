"""How often the number of rows is decided."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

from orchestrator.dispatch.rows import EVERY_S, MAX_PAUSES, RowControl
from tests.support.admission import Rig


class NoInstances:
    """A registry that notes when it is looked at, once for each decision."""

    def __init__(self, rig: Rig) -> None:
        self.instances: dict[str, object] = {}
        self.looked_at: list[float] = []
        self._now = rig.clock.now

    def __iter__(self) -> Iterator[object]:
        self.looked_at.append(self._now())
        return iter(())


def test_the_pause_grows_while_nothing_is_asked_for_and_is_short_again_for_the_next_request() -> (
    None
):
    rig = Rig()
    registry, in_flight = cast(Any, NoInstances(rig)), cast(Any, ["a job"])
    rows = RowControl(
        cast(Any, None), registry, rig.prediction, rig.queue, in_flight, rig.clock, enabled=True
    )

    def pauses(seconds: float) -> list[int]:
        registry.looked_at = [rig.clock.now()]
        rig.clock.advance(seconds)
        at = registry.looked_at
        return [round((b - a) / EVERY_S) for a, b in pairwise(at)]

    rows.asked(rig.task(10_000), lambda: None)
    assert pauses(1.0) == [1, 2, *[MAX_PAUSES] * 4]
    rows.asked(rig.task(10_000), lambda: None)
    assert pauses(0.4) == [1, 2, MAX_PAUSES]
    in_flight.clear()
    assert pauses(5.0) == [3], "nothing is decided while nothing runs"
    rows.asked(rig.task(10_000), lambda: None)
    assert pauses(5.0) == [1]
