import pytest

from worker.engine.pace import Pace


def test_nothing_is_held_back_before_anything_is_measured() -> None:
    assert Pace().prompt_tokens_within(0.05, 512) == 512
    assert Pace().service_s(100, 100) == 0.0


def test_what_a_step_costs_anyway_is_not_charged_to_its_prompts() -> None:
    """A step of 20 ms with a prompt of 3 tokens in it says nothing about long prompts."""
    pace = Pace()
    for _ in range(10):
        pace.prefilled(0.02, 3)
    assert pace.prompt_tokens_within(0.05, 512) == 7
    pace.prefilled(0.02, 0)
    assert pace.prompt_token_s == pytest.approx(0.0)
    assert pace.prompt_tokens_within(0.05, 512) == 512


def test_long_chunks_weigh_more_than_short_ones() -> None:
    pace = Pace()
    pace.prefilled(1.0, 1000)
    for _ in range(5):
        pace.prefilled(0.01, 1)
    assert pace.prefill_tokens_per_s == pytest.approx(1000, rel=0.1)


def test_service_is_prompt_and_answer() -> None:
    pace = Pace()
    pace.prefilled(1.0, 1000)
    pace.decoded(0.02, 1)
    assert pace.service_s(500, 10) == pytest.approx(0.7)


def test_answers_teach_how_long_they_get() -> None:
    pace = Pace()
    pace.answered(32)
    pace.answered(64)
    assert pace.typical_tokens == pytest.approx(34)
