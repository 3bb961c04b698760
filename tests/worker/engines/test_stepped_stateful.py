"""Whatever happens in whatever order: every job ends exactly once, and no slot is used twice."""

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from protocol import AbortCause, FinishReason, OnDeadline
from tests.support.backend import SteppedBench
from tests.support.engine import EOS
from worker.core import Event, Job, JobFinished, JobPaused, JobResumed, JobStarted
from worker.engines.stepped import Produced


class AnyOrder(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    @initialize(frees_at_once=st.booleans(), running=st.integers(1, 3), waiting=st.integers(0, 3))
    def build(self, frees_at_once: bool, running: int, waiting: int) -> None:
        self.bench = SteppedBench(
            frees_at_once=frees_at_once, max_running=running, max_waiting=waiting
        )
        self.bench.engine.connect(self.take)
        self.submitted: list[Job] = []
        self.started: set[Job] = set()
        self.paused: set[Job] = set()
        self.ended: set[Job] = set()
        self.has_failed = False

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.job not in self.ended, "something followed the end"
            if isinstance(event, JobStarted):
                assert event.job not in self.started
                self.started.add(event.job)
            elif isinstance(event, JobFinished):
                self.ended.add(event.job)
            elif isinstance(event, JobPaused):
                assert event.job not in self.paused
                self.paused.add(event.job)
            elif isinstance(event, JobResumed):
                self.paused.remove(event.job)
            else:
                assert event.job not in self.paused, "a paused job spoke"
                assert event.job in self.started

    @rule(
        target=jobs,
        left_s=st.floats(0.0, 2.0),
        on_deadline=st.sampled_from([OnDeadline.ERROR, OnDeadline.PARTIAL]),
        max_tokens=st.integers(1, 20),
        share=st.floats(0, 1),
        ignore_eos=st.booleans(),
        keeps_on=st.booleans(),
    )
    def submit(
        self,
        left_s: float,
        on_deadline: OnDeadline,
        max_tokens: int,
        share: float,
        ignore_eos: bool,
        keeps_on: bool,
    ) -> Job:
        job = self.bench.submit(
            left_s=left_s,
            on_deadline=on_deadline,
            max_tokens=max_tokens,
            min_tokens=int(share * max_tokens),
            ignore_eos=ignore_eos,
            keeps_on=keeps_on,
        )
        self.submitted.append(job)
        return job

    @rule(job=jobs, cause=st.sampled_from(list(AbortCause)))
    def cancel(self, job: Job, cause: AbortCause) -> None:
        self.bench.engine.cancel(job, cause)

    @rule(job=jobs, cause=st.sampled_from(list(AbortCause)))
    def cancel_during_a_step(self, job: Job, cause: AbortCause) -> None:
        self.bench.core.during = lambda: self.bench.engine.cancel(job, cause)
        self.step()
        self.bench.core.during = lambda: None

    @rule(job=jobs)
    def pause(self, job: Job) -> None:
        self.bench.engine.pause(job)

    @rule(job=jobs)
    def resume(self, job: Job) -> None:
        self.bench.engine.resume(job)

    @rule(is_busy=st.booleans())
    def step_while_none_can_be_paused(self, is_busy: bool) -> None:
        self.bench.core.is_busy = is_busy
        self.step()
        self.bench.core.is_busy = False

    @rule(seconds=st.floats(0.0, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.bench.clock.now += seconds

    @rule()
    def step(self) -> None:
        self.take(self.bench.engine.step())

    @rule(
        ids=st.lists(st.sampled_from([5, 7, EOS]), max_size=3),
        end=st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR]),
    )
    def step_with(self, ids: list[int], end: FinishReason | None) -> None:
        self.bench.core.answer = lambda handle, job: Produced(handle, list(ids), end=end)
        self.step()
        self.bench.core.answer = None

    @rule(target=jobs)
    def one_is_refused(self) -> Job:
        self.bench.core.refuses = True
        job = self.submit(1.0, OnDeadline.ERROR, 1, 0.0, False, False)
        self.step()
        self.bench.core.refuses = False
        return job

    @rule(target=jobs)
    def stop(self) -> object:
        self.bench.engine.stop()
        assert self.ended == set(self.submitted)
        assert self.bench.core.closed == 1
        self.build(True, 2, 2)
        return multiple()

    @rule(target=jobs)
    def fail(self) -> object:
        self.bench.core.fails = True
        with suppress(RuntimeError):
            self.step()
        self.bench.core.fails = False
        return self.stop()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "bench"):
            return
        stats = self.bench.engine.stats()
        held = len(self.bench.core.jobs) + len(self.bench.core.going)
        assert held <= self.bench.core.most
        assert stats.tokens_total >= 0 and stats.running <= self.bench.core.most
        if not self.bench.engine.has_work:
            assert self.ended == set(self.submitted)
            assert held == 0 and not self.bench.core.paused

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.core.answer = None
            for job in self.submitted:
                self.bench.engine.resume(job)
            for _ in range(1000):
                if not self.bench.engine.has_work:
                    break
                self.step()
            assert self.ended == set(self.submitted)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
