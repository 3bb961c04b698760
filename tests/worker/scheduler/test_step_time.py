import random

import pytest

from worker.scheduler.step_time import BOUND_STEPS, StepTime


def decode(
    step_time: StepTime, step_s: float, steps: int = 1, rows: int = 1, tokens: int = 1
) -> None:
    for _ in range(steps):
        step_time.decoded(step_s, tokens, rows=rows)
        step_time.prefilled(step_s, 0)


def test_what_a_step_costs_anyway_is_not_charged_to_its_prompts() -> None:
    """A step of 20 ms with a prompt of 3 tokens in it says nothing about long prompts."""
    step_time = StepTime()
    for _ in range(10):
        step_time.prefilled(0.02, 3)
    assert step_time.prompt_tokens_within(0.05, 512) == 7
    step_time.prefilled(0.02, 0)
    assert step_time.prompt_token_s == pytest.approx(0.0)
    assert step_time.prompt_tokens_within(0.05, 512) == 512


def test_an_accident_does_not_cut_the_chunks_that_follow() -> None:
    """A step that stood still for a second, among steps of 10 ms and 0.1 ms a prompt's token."""
    step_time = StepTime()
    decode(step_time, 0.01, 50)
    for _ in range(30):
        step_time.prefilled(0.06, 500)
    usual = step_time.prompt_tokens_within(0.05, 512)
    step_time.prefilled(1.06, 500)
    assert step_time.prompt_tokens_within(0.05, 512) > 0.75 * usual
    for _ in range(20):  # a new speed, and no accident
        step_time.prefilled(0.61, 500)
    assert step_time.prompt_token_s == pytest.approx(0.0012, rel=0.35)


def test_what_each_chunk_takes_is_told_from_what_its_tokens_take() -> None:
    """On a GPU a step with a prompt takes 5 ms more, however short the prompt is."""
    step_time = StepTime()
    decode(step_time, 0.007, 20)
    rng = random.Random(1)
    for _ in range(60):
        tokens = rng.randrange(32, 512)
        step_time.prefilled(0.012 + 1e-5 * tokens * rng.uniform(0.9, 1.1), tokens)
    assert step_time.chunk_s == pytest.approx(0.005, rel=0.1)
    assert step_time.further_token_s == pytest.approx(1e-5, rel=0.2)
    assert step_time.prompt_tokens_within(0.008, 512) == pytest.approx(300, rel=0.2)
    assert step_time.prompt_tokens_within(0.004, 512) == 0
    for _ in range(200):  # All alike, they tell nothing of it.
        step_time.prefilled(0.012 + 1e-5 * 512, 512)
    assert step_time.chunk_s == pytest.approx(0.005, rel=0.1)
    for _ in range(200):  # Nor can it be more than a chunk takes now.
        step_time.prefilled(0.009, 512)
    assert step_time.chunk_s <= 0.0021


def test_what_is_certain_is_not_learnt_from_few_steps_or_from_batches() -> None:
    """DL-3: only many steps of one row alone tell what one row can do."""
    step_time = StepTime()
    decode(step_time, 0.28)
    assert step_time.least_token_s == 0.0
    decode(step_time, 0.02, 1000, rows=8)
    assert step_time.least_token_s == 0.0
    decode(step_time, 0.01, 200)
    assert step_time.least_token_s == pytest.approx(0.008)


def test_a_machine_that_gets_faster_is_measured_again() -> None:
    """DL-3: what was measured in a dip is not certain once the dip is over."""
    step_time = StepTime()
    decode(step_time, 0.1, 200)
    assert step_time.least_token_s > 0
    decode(step_time, 0.01, 20)
    assert step_time.least_token_s == 0.0
    decode(step_time, 0.01, 80)
    assert step_time.least_token_s == pytest.approx(0.008)


def test_a_step_that_is_read_late_makes_no_other_one_fast() -> None:
    """Of a step read 8 ms late and the next one, which then seems to take 2 ms: 10 ms each."""
    step_time = StepTime()
    for _ in range(100):
        decode(step_time, 0.01, BOUND_STEPS)
        decode(step_time, 0.018)
        decode(step_time, 0.002)
    assert step_time.least_token_s >= 0.8 * 0.0085


def test_a_slow_step_is_one_that_few_exceed() -> None:
    """DL-6: with chunks of prompts in some, which are no noise."""
    step_time = StepTime()
    draw = random.Random(5)
    exceeded = 0
    for step in range(4000):
        tokens = draw.choice([0, 0, 0, 100])
        step_s = (0.02 + 0.0003 * tokens) * draw.lognormvariate(0, 0.2)
        if draw.random() < 0.02:
            step_s += 0.04
        if step >= 100:
            exceeded += step_s > step_time.slow_step_s(tokens)
        step_time.decoded(step_s, 1, rows=4, prompt_tokens=tokens)
        step_time.prefilled(step_s, tokens)
    assert exceeded < 0.015 * 4000
    assert step_time.slow_step_s(0) < 5 * 0.03


def test_one_accident_is_not_expected_again() -> None:
    step_time = StepTime()
    decode(step_time, 0.01, 50)
    decode(step_time, 10.0)
    assert step_time.slow_step_s(0) < 8
    decode(step_time, 0.01, 200)
    assert step_time.slow_step_s(0) < 0.07
