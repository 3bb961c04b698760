"""DL-17: a job that keeps on is not stopped early, and says whether it would have been."""

from protocol import Code, Sampling
from tests.support.engine import end_of
from tests.worker.engine.test_expiry import Service
from worker.core import Job
from worker.runner.synthetic import StepCost


def test_dl17_what_keeps_on_runs_to_its_deadline() -> None:
    service = Service(StepCost(0.004))
    service.submit(300, 60.0)
    service.finish()  # the pace is known now
    began = service.clock.now
    sampling = Sampling(max_tokens=1000, ignore_eos=True)
    jobs = [Job([9] * 5, sampling, began + 2.0, keeps_on=keeps_on) for keeps_on in (False, True)]
    for job in jobs:
        service.engine.submit(job)
    service.finish()
    stopped, spared = (end_of(job, service.events) for job in jobs)
    assert stopped.code is spared.code is Code.DEADLINE_EXCEEDED
    assert not stopped.spared and spared.spared
    assert service.told_at[jobs[0]] < began + 1.9
    assert service.told_at[jobs[1]] >= began + 2.0
