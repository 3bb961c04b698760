"""WK-13: on CUDA the sizes of a step follow from what steps take there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol import StepCosts
from tests.worker.engine.test_step_costs import CONFIG
from worker.engine.sizes import fitting, largest
from worker.settings import WorkerSettings

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
H100 = StepCosts(ROWS, (7.0, 7.0, 7.1, 7.1, 7.2, 7.5, 8.0, 9.0, 11.0), 0.04, 6.0, 0.023)
"""An 8B model as measured there: decodes nearly free, a chunk of a prompt costs 6 ms more."""


def settings(**values: Any) -> WorkerSettings:
    return WorkerSettings(model_path=Path("m"), **{"engine": "torch", "device": "cuda"} | values)


def chosen(costs: StepCosts, **stated: Any) -> tuple[int, int]:
    asked = settings(**stated)
    built = largest(asked)
    config = replace(CONFIG, max_running=built.max_running, max_step_tokens=built.max_step_tokens)
    found = fitting(asked, config, costs)
    return found.max_running, found.max_step_tokens


def test_a_gpu_gets_the_rows_and_tokens_that_its_steps_are_worth() -> None:
    assert chosen(H100) == (256, 2048)
    # Its steps get slower with each row from 32 on, and a prompt costs next to nothing at first.
    small = StepCosts(ROWS, (7.0, 7.0, 7.0, 7.0, 8.0, 10.0, 20.0, 40.0, 80.0), 0.2, 1.0, 0.2)
    assert chosen(small) == (32, 512)


def test_what_the_operator_states_is_not_changed() -> None:
    assert chosen(H100, max_running=64, max_step_tokens=512) == (64, 512)
    assert chosen(H100, max_running=16)[1] == 2048
    assert chosen(H100.up_to(128), max_step_tokens=128) == (128, 128), "a row needs a token"


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"engine": "vllm"}])
def test_elsewhere_the_settings_hold(other: dict[str, str]) -> None:
    asked = settings(**other)
    assert largest(asked) == asked
    assert fitting(asked, CONFIG, H100) == CONFIG


def test_the_costs_end_with_the_most_rows() -> None:
    assert H100.up_to(64).rows == ROWS[:7] and H100.up_to(64).step_ms[-1] == 8.0
    assert H100.up_to(1000) == H100, "a pool may hold fewer requests than may run"
