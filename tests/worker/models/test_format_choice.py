"""Layouts of linear layers are chosen by what their products take here."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from worker.choices import Choices, in_turns
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


def test_a_choice_is_kept_for_the_machine_and_the_model(tmp_path: Path) -> None:
    """WK-14: measured once, then until the file is removed, or what it is about has changed."""
    formats = {"dense": DenseFormat(), "turned": TurnedFormat()}

    def chosen(facts: dict[str, object], *seconds: float) -> object:
        choices = Choices(tmp_path, facts)
        return fastest_format(formats, SHAPE, torch.float32, timer=timer(*seconds), choices=choices)

    assert chosen({"cpu": "a"}, 1.0, 0.5) is formats["turned"]
    assert chosen({"cpu": "a"}) is formats["turned"], "and nothing was measured"
    assert chosen({"cpu": "b"}, 1.0, 2.0) is formats["dense"]
    (tmp_path / "file").write_text("")
    for file in tmp_path.glob("*.json"):
        file.write_text("{")
    assert chosen({"cpu": "a"}, 1.0, 2.0) is formats["dense"]
    unusable = Choices(tmp_path / "file", {})
    unusable.keep("matrix products", "dense")
    assert unusable.kept("matrix products", formats) is None


def test_a_busy_moment_decides_nothing() -> None:
    """One sample of each in turn, the median of them."""
    spikes = iter([1.0, 0.9, 50.0, 0.9, 1.0, 40.0] + 4 * [1.0, 0.9])
    measured = in_turns({"slow": lambda: next(spikes), "fast": lambda: next(spikes)})
    assert measured == {"slow": 1.0, "fast": 0.9}
