"""An engine that is stepped by hand, on a clock that only moves when told to."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol import OnDeadline, Sampling, TokenLogprob
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
        "tile_tokens": 1,
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
        first_token_s: float = math.inf,
        **sampling: object,
    ) -> Job:
        job = Job([9] * prompt if isinstance(prompt, int) else prompt, Sampling(1), 0.0)
        asked = {"max_tokens": 8} | sampling
        for name in ("keeps_on", "constraint"):
            if name in asked:
                setattr(job, name, asked.pop(name))
        job.sampling = Sampling(**asked)  # type: ignore[arg-type]
        job.deadline, job.on_deadline = self.clock.now + left_s, on_deadline
        job.first_token_by = self.clock.now + first_token_s
        self.engine.submit(job)
        return job

    def step(self, steps: int = 1) -> list[Event]:
        events: list[Event] = []
        for _ in range(steps):
            events += self.engine.step()
            self.check()
        return events

    def finish(self) -> list[Event]:
        """Step until nothing is left."""
        events = self.step()
        while self.engine.has_work:
            events += self.step()
        return events

    def check(self) -> None:
        self.scheduler.check_integrity()

    @property
    def is_clean(self) -> bool:
        self.check()
        return not self.engine.has_work and self.engine.stats().kv_blocks_used == 0

    # ── what a suite over all engines tells one ──────────────────────────────────────────────

    def takes(self, step_s: float) -> None:
        self.runner.step_s = step_s

    def meanwhile(self, action: Callable[[], None]) -> None:
        """Do something while a step is computed."""
        self.runner.during = lambda plan: action()

    def says(self, ids: list[int], logprobs: list[TokenLogprob] | None = None) -> None:
        """Have every step give these tokens to every job, or as many as it may have."""

        def answer(plan: Plan) -> StepResult:
            room = [row.request.limit_tokens - len(row.request.tokens) for row in plan.rows]
            given = [ids[: n if row.samples else 0] for n, row in zip(room, plan.rows, strict=True)]
            told = [logprobs and logprobs[: len(one)] for one in given]
            return StepResult(given, None if logprobs is None else told)

        self.runner.answer = answer


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
