"""Every way that a linear layer can lie in memory, against float64."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from worker.choices import CLEARLY, KeptChoices, in_turns
from worker.models.linear import DenseFormat, Format, PackedFormat, TurnedFormat, packs
from worker.models.loader import TRIAL_ROWS, fastest_format

FORMATS: dict[str, Format] = {"dense": DenseFormat(), "packed": PackedFormat()}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture(params=FORMATS, ids=list(FORMATS))
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products_are_right(form: Format, dtype: torch.dtype) -> None:
    if isinstance(form, PackedFormat) and not packs(dtype):
        pytest.skip(f"oneDNN has no packed {dtype} layers on this CPU")
    weight, bias = (tensor.to(dtype) for tensor in (random(96, 128), random(96, seed=1)))
    tolerance = TOLERANCE[dtype]
    for rows in (1, 3, 5, 33, 80):
        x = random(rows, 128).to(dtype)
        with torch.inference_mode():
            plain, biased = form.linear(weight, None), form.linear(weight, bias)
            gated = form.gated(weight)
            exact = x.double() @ weight.double().T
            assert error(plain(x), exact) < tolerance, rows
            assert error(biased(x), exact + bias.double()) < tolerance, rows
            gate, up = exact.chunk(2, dim=-1)
            assert error(gated(x), torch.nn.functional.silu(gate) * up) < 2 * tolerance, rows


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
        choices = KeptChoices(tmp_path, facts)
        return fastest_format(formats, SHAPE, torch.float32, timer=timer(*seconds), choices=choices)

    assert chosen({"cpu": "a"}, 1.0, 0.5) is formats["turned"]
    assert chosen({"cpu": "a"}) is formats["turned"], "and nothing was measured"
    assert chosen({"cpu": "b"}, 1.0, 2.0) is formats["dense"]
    (tmp_path / "file").write_text("")
    for file in tmp_path.glob("*.json"):
        file.write_text("{")
    assert chosen({"cpu": "a"}, 1.0, 2.0) is formats["dense"]
    unusable = KeptChoices(tmp_path / "file", {})
    unusable.keep("matrix products", "dense")
    assert unusable.kept("matrix products", formats) is None


def test_a_busy_moment_decides_nothing() -> None:
    """One sample of each in turn, the median of them."""
    spikes = iter([1.0, 0.9, 50.0, 0.9, 1.0, 40.0] + 4 * [1.0, 0.9])
    measured = in_turns({"slow": lambda: next(spikes), "fast": lambda: next(spikes)})
    assert measured == {"slow": 1.0, "fast": 0.9}
