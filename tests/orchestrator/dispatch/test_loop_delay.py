"""DL-16: what ends just before its deadline allows for a loop that is late."""

import pytest

from orchestrator.dispatch.time_limits import EVERY_S, LoopDelay
from tests.support.clock import ManualClock


class LateClock(ManualClock):
    """Whose timers run late."""

    late_s = 0.0

    def call_at(self, when, callback):  # type: ignore[no-untyped-def]
        return super().call_at(when + self.late_s, callback)


def test_dl16_a_late_loop_is_noticed_and_forgotten_as_soon() -> None:
    clock = LateClock()
    delay = LoopDelay(clock)
    assert delay.longest_s == 0.0
    for late_s in (0.0, 0.015, 0.0, 0.003, 0.03):
        clock.late_s = late_s
        delay.watch(clock.now() + 2.0)
        clock.advance(2.0)
        assert delay.longest_s == pytest.approx(late_s, abs=1e-6)


def test_it_is_measured_only_while_somebody_wants_it() -> None:
    clock = ManualClock()
    delay = LoopDelay(clock)
    for _ in range(3):
        delay.watch(clock.now() + 5 * EVERY_S)
    clock.advance(100.0)
    assert not clock._timers
    clock.advance(1.0)
    delay.watch(clock.now() + 5 * EVERY_S)
    assert len(clock._timers) == 1
