"""An engine that is stepped by hand, on a clock that only moves when told to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol import OnDeadline, Sampling
from worker.core import Event, Job, JobFinished, JobStarted, JobTokens
from worker.engine.engine import Engine, EngineConfig
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import Plan, StepResult
from worker.scheduler.scheduler import Scheduler

EOS = 2
VOCABULARY = 100


class FakeClock:
    """Seconds, moved by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeRunner:
    """Gives every sampling row the token 7, unless told otherwise; a step takes ``step_s``."""

    clock: FakeClock
    step_s: float = 0.0
    during: Callable[[Plan], None] = lambda plan: None
    answer: Callable[[Plan], StepResult] | None = None
    plans: list[Plan] = field(default_factory=list)
    closed: bool = False

    def execute(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        self.clock.now += self.step_s
        self.during(plan)
        if self.answer is not None:
            return self.answer(plan)
        return StepResult([[7] if row.samples else [] for row in plan.rows])

    def close(self) -> None:
        self.closed = True


def config(**changes: float) -> SchedulerConfig:
    values: dict[str, float] = {
        "vocab_size": VOCABULARY,
        "context_tokens": 64,
        "block_tokens": 4,
        "max_running": 4,
        "max_waiting": 4,
        "max_step_tokens": 16,
        "min_start_budget_s": 0.1,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


class Bench:
    """An engine with its clock and runner at hand."""

    def __init__(self, blocks: int = 64, **changes: float) -> None:
        self.clock = FakeClock()
        self.runner = FakeRunner(self.clock)
        self.scheduler = Scheduler(config(**changes), BlockPool(blocks))
        self.engine = Engine(
            self.scheduler, self.runner, EngineConfig([EOS]), clock=self.clock, draw_seed=lambda: 5
        )

    def submit(
        self,
        prompt: int | Sequence[int] = 3,
        *,
        left_s: float = 100.0,
        on_deadline: OnDeadline = OnDeadline.ERROR,
        **sampling: object,
    ) -> Job:
        parameters = Sampling(**({"max_tokens": 8} | sampling))  # type: ignore[arg-type]
        ids = [9] * prompt if isinstance(prompt, int) else prompt
        job = Job(ids, parameters, self.clock.now + left_s, on_deadline)
        self.engine.submit(job)
        return job

    def step(self, steps: int = 1) -> list[Event]:
        events: list[Event] = []
        for _ in range(steps):
            events += self.engine.step()
            self.scheduler.check_integrity()
        return events

    def finish(self) -> list[Event]:
        """Step until nothing is left."""
        events = self.step()
        while self.scheduler.has_work:
            events += self.step()
        return events

    @property
    def is_clean(self) -> bool:
        self.scheduler.check_integrity()
        return not self.scheduler.has_work and self.scheduler.pool.used_count == 0


def end_of(job: Job, events: list[Event]) -> JobFinished:
    ends = [e for e in events if isinstance(e, JobFinished) and e.job is job]
    assert len(ends) == 1, f"{len(ends)} ends"
    mine = [e for e in events if e.job is job]
    assert mine[-1] is ends[0], "something followed the end"
    return ends[0]


def ids_of(job: Job, events: list[Event]) -> list[int]:
    return [i for e in events if isinstance(e, JobTokens) and e.job is job for i in e.ids]


def was_started(job: Job, events: list[Event]) -> bool:
    return any(isinstance(e, JobStarted) and e.job is job for e in events)
