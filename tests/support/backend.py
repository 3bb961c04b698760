"""An engine that others wrote, as a test needs it: on a clock that only its steps move."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from protocol import FinishReason, TokenLogprob
from tests.support.engine import EOS, VOCABULARY, Bench, FakeClock
from tests.support.fake_worker import make_card
from worker.core import Job
from worker.engine.loop import EngineLoop
from worker.engines.stepped import CoreLoad, Produced, SteppedBackend
from worker.errors import InvalidCall


@dataclass
class FakeCore:
    """Gives every job the token 7 in each step of ``step_s``; ends it after its ``max_tokens``.

    What was aborted keeps its place until the next step has returned, unless it ``frees_at_once``.
    """

    clock: FakeClock
    step_s: float = 0.01
    most: int = 4
    frees_at_once: bool = False
    ends_jobs: bool = True
    refuses: bool = False
    fails: bool = False
    during: Callable[[], None] = lambda: None
    answer: Callable[[int, Job], Produced | None] | None = None
    jobs: dict[int, tuple[Job, int]] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    going: set[int] = field(default_factory=set)
    paused: dict[int, tuple[Job, int]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    """Handles whose memory is not freed."""
    has_failed: bool = False
    is_busy: bool = False
    """Whether no job can be paused now."""
    order: list[Job] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    steps: int = 0
    read: int = 0
    closed: int = 0

    def add(self, handle: int, job: Job, max_tokens: int) -> None:
        if self.refuses:
            raise InvalidCall("not this one")
        assert handle not in self.jobs and handle not in self.going
        assert max_tokens >= 1 and not self.closed
        self.jobs[handle] = job, max_tokens
        self.given[handle] = 0
        self.order.append(job)
        assert len(self.jobs) + len(self.going) <= self.most, "more jobs than max_running"

    def abort(self, handles: Collection[int]) -> None:
        for handle in handles:
            self.paused.pop(handle, None)
            if self.jobs.pop(handle, None) and not self.frees_at_once:
                self.going.add(handle)

    def holds(self, handle: int) -> bool:
        return handle in self.stuck

    def pause(self, handle: int) -> bool:
        if not self.is_busy:
            self.paused[handle] = self.jobs.pop(handle)
        return not self.is_busy

    def resume(self, handle: int) -> None:
        if handle in self.paused:
            self.jobs[handle] = self.paused.pop(handle)
        assert len(self.jobs) + len(self.going) <= self.most, "more jobs than max_running"

    def step(self, wait_s: float) -> Sequence[Produced]:
        self.waits.append(wait_s)
        if not self.jobs:
            self.going.clear()
            self.clock.now += wait_s
            return []
        self.steps += 1
        self.clock.now += self.step_s
        self.during()
        if self.fails:
            raise RuntimeError("the device is gone")
        made = [one for handle in list(self.jobs) if (one := self._answer(handle)) is not None]
        self.going.clear()
        return made

    def _answer(self, handle: int) -> Produced | None:
        job, max_tokens = self.jobs[handle]
        made = Produced(handle, [7]) if self.answer is None else self.answer(handle, job)
        if made is None:
            return None
        if not self.given[handle]:
            self.read += len(job.token_ids)
        self.given[handle] += len(made.ids)
        if self.ends_jobs and made.end is None:
            if not job.sampling.ignore_eos and EOS in made.ids:
                made.end = FinishReason.STOP
            elif self.given[handle] >= max_tokens:
                made.end = FinishReason.LENGTH
        if made.end is not None:
            del self.jobs[handle]
        return made

    def interrupt(self) -> None: ...

    def load(self) -> CoreLoad:
        held = len(self.jobs) + len(self.going)
        return CoreLoad(64, 2 * held, held, 0, prompt_tokens_total=self.read)

    def close(self) -> None:
        self.closed += 1


class SteppedBench(Bench):
    """An engine over a ``FakeCore`` that is stepped by hand."""

    def __init__(self, *, frees_at_once: bool = False, **changes: object) -> None:
        self.clock = FakeClock()
        values: dict[str, object] = {
            "context_tokens": 64,
            "full_context_tokens": 64,
            "max_running": 4,
            "max_waiting": 4,
            "min_start_budget_ms": 100.0,
            "vocab_size": VOCABULARY,
            "max_step_tokens": 512,
            "can_pause": True,
        }
        card = make_card(**(values | changes))
        self.core = FakeCore(self.clock, most=card.max_running, frees_at_once=frees_at_once)
        backend = SteppedBackend(self.core, card, frees_at_once=frees_at_once, clock=self.clock)
        self.engine = EngineLoop(backend, [EOS], clock=self.clock)  # type: ignore[assignment]

    def check(self) -> None:
        assert len(self.core.jobs) + len(self.core.going) <= self.core.most

    def takes(self, step_s: float) -> None:
        self.core.step_s = step_s

    def meanwhile(self, action: Callable[[], None]) -> None:
        self.core.during = action

    def says(self, ids: list[int], logprobs: list[TokenLogprob] | None = None) -> None:
        self.core.answer = lambda handle, job: Produced(handle, list(ids), logprobs)
