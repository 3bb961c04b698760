"""DL-6: an answer that is to fit is as long as its deadline allows."""

from dataclasses import replace

from orchestrator.prediction.forecaster import FIT_HEADROOM
from protocol import OnDeadline
from tests.support.admission import PACE, UNKNOWN, Rig


def test_dl6_fit_says_what_the_deadline_allows() -> None:
    rig = Rig()
    task = rig.task(1000, 500, on_deadline=OnDeadline.FIT)
    rig.forecaster.fit(task, 1000)  # when it starts: only then is it known what is left
    # 1000 ms / 10 ms alone on the instance, less the prompt: most of the budget (DL-16).
    assert task.fitted_tokens is not None and 85 <= task.fitted_tokens <= 100
    rig.forecaster.fit(task, 500)
    assert 40 <= task.fitted_tokens <= 50
    busy = Rig(load=15)
    full = busy.task(1000, 500, on_deadline=OnDeadline.FIT)
    busy.forecaster.fit(full, 1000)
    assert full.fitted_tokens is not None
    assert 45 <= full.fitted_tokens <= 56  # 18 ms a token among 16
    enough = rig.task(60_000, 500, on_deadline=OnDeadline.FIT)
    rig.forecaster.fit(enough, 60_000)
    assert (enough.fitted_tokens, enough.sampling.max_tokens) == (None, 500)


def test_dl6_a_pace_that_was_too_slow_does_not_cut_an_answer_short() -> None:
    """DL-16, DL-19: what is told may be wrong; the bound that is reserved is well beyond it, and
    where nothing was measured it is the client's own."""
    rig = Rig(replace(PACE, base_ms=38.0, row_ms=2.0, prompt_token_ms=0.4))
    task = rig.task(1000, 500, on_deadline=OnDeadline.FIT)
    rig.forecaster.fit(task, 1000)
    assert task.fitted_tokens is not None and 20 <= task.fitted_tokens <= 24
    assert task.sampling.max_tokens == FIT_HEADROOM * task.fitted_tokens
    guessed = Rig(UNKNOWN)
    task = guessed.task(1000, 500, on_deadline=OnDeadline.FIT)
    guessed.forecaster.fit(task, 1000)
    assert task.fitted_tokens is not None and task.fitted_tokens < 100
    assert task.sampling.max_tokens == 500


def test_dl22_a_call_of_a_run_keeps_to_its_share() -> None:
    rig = Rig()
    task = rig.task(1000, 500, on_deadline=OnDeadline.FIT, calls_left=1)
    rig.forecaster.fit(task, 1000)
    assert task.fitted_tokens == task.sampling.max_tokens <= 50
