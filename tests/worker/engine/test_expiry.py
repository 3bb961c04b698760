"""Who is stopped early, and how early, on steps that take as long as real ones (DL-3, DL-6)."""

import random
from collections.abc import Callable

import pytest

from protocol import FinishReason, OnDeadline, Sampling
from tests.support.cases import for_each
from tests.support.engine import EOS, FakeClock, config, end_of, ids_of
from worker.core import Event, Job, JobFinished
from worker.engine.engine import Engine, EngineConfig
from worker.runner.synthetic import FreeRunner, StepCost
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.plan import Plan, StepResult
from worker.scheduler.scheduler import Scheduler


class NoisyRunner:
    """Steps of a synthetic pace times ``factor``, on a clock that only it moves."""

    def __init__(self, clock: FakeClock, cost: StepCost, factor: Callable[[], float]) -> None:
        self._clock = clock
        self._cost = cost
        self._factor = factor
        self._free = FreeRunner([10, 11, 12], tokens_per_step=1)

    def execute(self, plan: Plan) -> StepResult:
        self._clock.now += self._cost.of(plan) * self._factor()
        return self._free.execute(plan)

    def close(self) -> None:
        pass


class Service:
    """An engine as it runs: what it tells is stamped with the time at which it is told."""

    def __init__(self, cost: StepCost, factor: Callable[[], float] = lambda: 1.0) -> None:
        self.clock = FakeClock()
        limits = config(
            context_tokens=2048,
            block_tokens=16,
            max_running=32,
            max_waiting=32,
            max_step_tokens=256,
        )
        scheduler = Scheduler(limits, BlockPool(32 * 128))
        runner = NoisyRunner(self.clock, cost, factor)
        self.engine = Engine(scheduler, runner, EngineConfig([EOS]), clock=self.clock)
        self.events: list[Event] = []
        self.told_at: dict[Job, float] = {}
        self.engine._sink = self._take

    def _take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, JobFinished):
                self.told_at[event.job] = self.clock.now

    def submit(
        self,
        max_tokens: int,
        left_s: float,
        *,
        prompt: int = 5,
        on_deadline: OnDeadline = OnDeadline.ERROR,
        ignore_eos: bool = True,
    ) -> Job:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos)
        job = Job([9] * prompt, sampling, self.clock.now + left_s, on_deadline)
        self.engine.submit(job)
        return job

    def step(self) -> None:
        self.engine._publish(self.engine.step())

    def finish(self) -> None:
        self.step()
        while self.engine.scheduler.has_work:
            self.step()

    def reason(self, job: Job) -> FinishReason:
        return end_of(job, self.events).reason


def test_a_slow_first_step_ends_nobody() -> None:
    """DL-3: 1,000 tokens at 4.4 ms fit into 30 s, though the first one took 0.28 s."""
    factors = iter([64.0])
    service = Service(StepCost(0.0044), lambda: next(factors, 1.0))
    job = service.submit(1000, 30.0)
    service.finish()
    assert service.reason(job) is FinishReason.LENGTH


def test_equal_streams_are_not_ended_together() -> None:
    """DL-3: eight of 1,200 tokens with 20 s, on a service that knows only such batches."""
    factors = iter([3.0, 2.0, 2.0])
    service = Service(StepCost(0.004, 0.0015), lambda: next(factors, 1.0))
    jobs = [service.submit(1200, 20.0) for _ in range(8)]
    service.finish()
    assert [service.reason(job) for job in jobs] == [FinishReason.LENGTH] * 8


@for_each("is_warm", [False, True])
def test_a_dip_of_pace_ends_nobody(is_warm: bool) -> None:
    """DL-3: for a second all takes ten times as long; 32 of 32 still make it."""
    dip: list[float] = []
    service = Service(StepCost(0.004, 0.0005), lambda: 10.0 if dip else 1.0)
    if is_warm:
        service.submit(300, 60.0)
        service.finish()
    jobs = [service.submit(1000, 25.0) for _ in range(32)]
    for _ in range(50):
        service.step()
    ends_at = service.clock.now + 1.0
    dip.append(ends_at)
    while service.clock.now < ends_at:
        service.step()
    dip.clear()
    service.finish()
    assert [service.reason(job) for job in jobs] == [FinishReason.LENGTH] * 32


@pytest.mark.slow
def test_partial_is_told_before_its_deadline() -> None:
    """DL-6, DL-16: in 99 of 100, next to others whose prompts and endings come at any time."""
    draw = random.Random(11)

    def factor() -> float:
        return draw.lognormvariate(0, 0.25) * (3.0 if draw.random() < 0.02 else 1.0)

    service = Service(StepCost(0.02, 0.001, 0.0002), factor)
    service.submit(100, 60.0)
    service.finish()
    partial: list[Job] = []
    while len(partial) < 400:
        if draw.random() < 0.1:
            left_s = draw.uniform(0.5, 3.0)
            job = service.submit(2000, left_s, on_deadline=OnDeadline.PARTIAL)
            partial.append(job)
        if draw.random() < 0.05:
            service.submit(draw.randrange(5, 80), 60.0, prompt=draw.randrange(1, 400))
        service.step()
    service.finish()
    ran = [job for job in partial if ids_of(job, service.events)]
    assert len(ran) > 380
    late = [job for job in ran if service.told_at[job] > job.deadline]
    assert len(late) <= len(ran) // 100
    used = sorted((service.told_at[job] - (job.deadline)) for job in ran)
    assert used[len(used) // 2] > -0.25, "most of the time is used"
