"""The fit that makes the paced engine behave as a real one."""

import pytest

from perf.engine.fit_step_time import PROMPTS, ROWS, Fit, StepPoint, fit


def test_a_fit_finds_the_pace_that_made_the_points() -> None:
    made = Fit(step_ms=1.3, row_ms=0.13, prompt_token_ms=0.09)
    points = [
        StepPoint(rows, prompt, made.of(rows + (prompt > 0), prompt))
        for rows in ROWS
        for prompt in PROMPTS
    ]
    found = fit(points)
    assert found.step_ms == pytest.approx(made.step_ms)
    assert found.row_ms == pytest.approx(made.row_ms)
    assert found.prompt_token_ms == pytest.approx(made.prompt_token_ms)


def test_nothing_takes_less_than_no_time() -> None:
    points = [
        StepPoint(1, 0, 5.0),
        StepPoint(2, 0, 4.0),
        StepPoint(1, 10, 6.0),
        StepPoint(2, 10, 5.0),
    ]
    assert fit(points).row_ms == 0.0
