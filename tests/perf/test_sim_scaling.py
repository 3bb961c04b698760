"""The simulated day with scalers: an ordered instance comes later, one that goes ends its work."""

from dataclasses import replace
from pathlib import Path

import pytest

from perf.sim.scaling import ENGINE, MOST, Scaled, day
from perf.sim.scenes import UNBOUNDED
from perf.sim.simulate import simulate

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.0000000,{300 + 9 * second},{80 + second}\n"
    for second in range(60)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "azure-conversation.csv"
    path.write_text(TRACE)
    return path


def test_instances_come_after_their_start_and_go_when_they_are_idle(trace: Path) -> None:
    """PF-7: as Kubernetes orders them, two at a time; nobody loses an answer by it."""
    drivers: list[Scaled] = []

    def scale(driver: Scaled) -> float:
        return 4.0 if driver.clock.now() < 30.0 else 1.0

    def new_driver(*given: object) -> Scaled:
        drivers.append(Scaled(scale, *given))  # type: ignore[arg-type]
        return drivers[0]

    arrivals = [one for one in day(trace, 2.0) if one.at_s < 150.0]
    fleet = replace(ENGINE.fleet, count=MOST)
    run = simulate(arrivals, fleet, UNBOUNDED, seed=1, new_driver=new_driver)
    sizes = drivers[0].sizes
    assert sizes[:2] == [3, 3] and max(sizes) == 4 and sizes[-1] < 4
    assert all(result.endings == 1 for result in run.results)
    assert sum(result.met for result in run.results) > 0.8 * len(run.results)
