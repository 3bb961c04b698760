"""Layouts of linear layers are chosen by what their products take here."""

import logging
from collections.abc import Callable

import pytest
import torch

from worker.models.linear import DenseFormat, TurnedFormat
from worker.models.loader import CLEARLY, TRIAL_ROWS, fastest_format

SHAPE = (64, 32)


def timer(*seconds: float) -> Callable[[Callable[[], object]], float]:
    """A timer that makes calls, and says that the formats take so many seconds by turns."""
    calls = 0

    def time(call: Callable[[], object]) -> float:
        nonlocal calls
        call()
        calls += 1
        return seconds[(calls - 1) % len(seconds)]

    return time


@pytest.mark.parametrize(
    ("second", "chosen"), [(0.5, "turned"), (CLEARLY + 0.01, "dense"), (2.0, "dense")]
)
def test_the_first_layout_is_kept_unless_another_is_clearly_faster(
    second: float, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    formats = {"dense": DenseFormat(), "turned": TurnedFormat()}
    with caplog.at_level(logging.INFO):
        # The trials of many rows use one matrix, the others several: more seconds a matrix.
        found = fastest_format(formats, SHAPE, torch.float32, timer=timer(1.0, second))
    assert found is formats[chosen]
    assert f"matrix products by {chosen}: dense takes 1.00 times as long as dense" in caplog.text
    assert f"turned takes {second:.2f} times as long as dense" in caplog.text
    assert all(f"{rows} rows " in caplog.text for rows in TRIAL_ROWS)


def test_one_layout_needs_no_trial() -> None:
    only = DenseFormat()
    assert fastest_format({"dense": only}, SHAPE, torch.float32, timer=timer()) is only
