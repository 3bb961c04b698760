"""DL-16: when a place falls free."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.prediction.start_times import start_ms

times = st.lists(st.floats(0.0, 1e5), min_size=1, max_size=16).map(sorted)


def test_dl16_a_start_is_the_middle_of_what_may_be() -> None:
    even = [10.0, 20.0, 30.0, 40.0]
    assert start_ms([even], [], 0) == 20.0
    assert start_ms([[100.0], [300.0]], [], 0) == 100.0
    assert start_ms([[100.0], [300.0]], [[50.0]], 0) == 150.0
    assert start_ms([[100.0], [300.0]], [[500.0]], 0) == 300.0
    assert start_ms([[100.0]], [], 1) == 0.0
    assert start_ms([], [], 0) == 0.0


@given(st.lists(times, max_size=8), st.lists(times, max_size=8), times, st.integers(-2, 3))
def test_dl16_more_ahead_never_means_sooner(
    running: list[list[float]], ahead: list[list[float]], one: list[float], free: int
) -> None:
    start = start_ms(running, ahead, free)
    assert start_ms(running, ahead, free + 1) <= start
    if len(running) > len(ahead) - free + 1:  # else there is nobody left to wait for
        assert start_ms(running, [*ahead, one], free) >= start
