"""DL-6: an answer that is to fit is as long as its deadline allows."""

from tests.support.admission import Rig
from worker.protocol import OnDeadline


def test_dl6_fit_shrinks_to_what_the_deadline_allows() -> None:
    rig = Rig()
    task = rig.task(1000, 500, on_deadline=OnDeadline.FIT)
    rig.forecaster.fit(task, 1000)  # when it starts: only then is it known what is left
    assert task.fitted_tokens == task.sampling.max_tokens
    # 1000 ms / 10 ms alone on the instance, less the prompt: most of the budget (DL-16).
    assert 85 <= task.sampling.max_tokens <= 100
    rig.forecaster.fit(task, 500)
    assert 40 <= task.sampling.max_tokens <= 50
    rig.forecaster.fit(task, 1000)
    assert task.sampling.max_tokens <= 50
    busy = Rig(load=15)
    full = busy.task(1000, 500, on_deadline=OnDeadline.FIT)
    busy.forecaster.fit(full, 1000)
    assert 45 <= full.sampling.max_tokens <= 56  # 18 ms a token among 16
    enough = rig.task(60_000, 500, on_deadline=OnDeadline.FIT)
    rig.forecaster.fit(enough, 60_000)
    assert (enough.fitted_tokens, enough.sampling.max_tokens) == (None, 500)
