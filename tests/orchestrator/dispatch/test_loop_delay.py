"""DL-16: what ends just before its deadline allows for a loop that is late."""

import pytest

from orchestrator.dispatch.time_limits import LoopDelay
from tests.support.clock import ManualClock


class LateClock(ManualClock):
    """Whose timers run late."""

    late_s = 0.0

    def call_at(self, when, callback):  # type: ignore[no-untyped-def]
        return super().call_at(when + self.late_s, callback)


def test_dl16_a_late_loop_is_noticed_and_forgotten_as_soon() -> None:
    clock = LateClock()
    delay = LoopDelay(clock)
    assert delay.long_s == 0.0
    for late_s in (0.0, 0.015, 0.0, 0.003, 0.03):
        clock.late_s = late_s
        delay.watch(clock.now() + 2.0)
        clock.advance(2.0)
        assert delay.long_s == pytest.approx(late_s, abs=1e-6)


def test_a_machine_that_stood_still_teaches_nothing() -> None:
    clock = LateClock()
    delay = LoopDelay(clock)
    clock.late_s = 60.0
    delay.watch(clock.now() + 600.0)
    clock.advance(600.0)
    assert delay.long_s == 0.0
