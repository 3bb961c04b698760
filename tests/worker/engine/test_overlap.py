"""Step N+1 launched before step N is read: the same tokens, and no block is free too early."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol import AbortCause, Code, FinishReason, OnDeadline, Sampling
from tests.support import engine
from tests.support.engine import EOS, FakeClock, config, end_of, ids_of
from tests.support.fake_device import FakeDevice, LaunchedFake, continuation
from worker.core import Event, Job, JobFinished, JobPaused, JobResumed, JobStarted, JobTokens
from worker.engine.engine import Engine, EngineConfig
from worker.kv_disk.base import BlockTier
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.plan import Plan
from worker.scheduler.scheduler import Scheduler

BLOCK_TOKENS = 4
NAN = 99
"""In a prompt, this token makes numbers that are not finite."""


ENDS_OF_NAN = Code.NOT_FINITE, Code.ENGINE_ERROR, Code.NO_CAPACITY, Code.DRAINING


@dataclass
class Bench(engine.Bench):
    overlap: bool = True
    blocks: int = 64
    step_s: float = 0.0
    limits: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.device = FakeDevice(self.clock, BLOCK_TOKENS, self.step_s)
        self.device.not_finite = [NAN]
        self.scheduler = Scheduler(
            config(block_tokens=BLOCK_TOKENS, **self.limits),
            BlockPool(self.blocks, self.device.clear),
        )
        self.engine = Engine(
            self.scheduler,
            self.device,
            EngineConfig([EOS], overlap=self.overlap),
            tier=self.make_tier(),
            clock=self.clock,
            draw_seed=lambda: 5,
        )

    def make_tier(self) -> BlockTier:
        return BlockTier()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        left_s: float = 1e6,
        on_deadline: OnDeadline = OnDeadline.ERROR,
        ignore_eos: bool = True,
    ) -> Job:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos)
        session = "chat" if max_tokens % 2 else ""  # which a disk tier keeps
        job = Job(prompt, sampling, self.clock.now + left_s, on_deadline, session=session)
        self.engine.submit(job)
        return job

    def finish(self) -> list[Event]:
        events = self.step()
        while self.scheduler.has_work or self.device.uncollected:
            events += self.step()
        return events

    def check(self) -> None:
        """WP-4: what a launched step touches belongs to the request that it was launched for."""
        self.scheduler.check_integrity()
        assert not self.device.violations, self.device.violations
        assert len(self.device.uncollected) <= 1
        for step in self.device.uncollected:
            for row in step.rows:
                assert row.request in self.scheduler.running, "freed while a step can touch it"
                assert row.request.slot == row.slot
                assert tuple(row.request.blocks) == row.blocks


class OverlapMachine(RuleBasedStateMachine):
    """Submit, pause, resume, cancel, expire, fail and let the device run on, in any order."""

    overlap = True

    def __init__(self) -> None:
        super().__init__()
        limits = {"max_running": 3, "max_waiting": 8, "max_step_tokens": 9}
        self.bench = Bench(self.overlap, blocks=20, step_s=0.01, limits=limits)
        self.alive: list[Job] = []
        self.answers: dict[int, list[int]] = {}
        self.standing: list[Job] = []

    @rule(
        prompt=st.lists(st.integers(9, 10), min_size=1, max_size=30),
        max_tokens=st.integers(1, 20),
        left_s=st.just(1e6) | st.floats(0.05, 0.6),
        on_deadline=st.sampled_from([OnDeadline.ERROR, OnDeadline.PARTIAL]),
        ignore_eos=st.booleans(),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        left_s: float,
        on_deadline: OnDeadline,
        ignore_eos: bool,
    ) -> None:
        job = self.bench.submit(
            prompt, max_tokens, left_s=left_s, on_deadline=on_deadline, ignore_eos=ignore_eos
        )
        self.alive.append(job)
        self.answers[id(job)] = []

    @rule(
        head=st.lists(st.integers(9, 10), max_size=20),
        tail=st.lists(st.integers(9, 10), max_size=20),
    )
    def submit_what_is_not_finite(self, head: list[int], tail: list[int]) -> None:
        """WK-12. Its head is like those of others."""
        self.submit([*head, NAN, *tail], 5, 1e6, OnDeadline.ERROR, True)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.note(self.bench.step())

    @rule()
    def the_device_gets_on(self) -> None:
        if self.bench.device.queue:
            self.bench.device.run_one()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), cause=st.sampled_from([AbortCause.CANCEL, AbortCause.STOP_STRING]))
    def cancel(self, data: st.DataObject, cause: AbortCause) -> None:
        job = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        self.bench.engine.cancel(job, cause)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), held=st.booleans())
    def pause_or_resume(self, data: st.DataObject, held: bool) -> None:
        job = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        (self.bench.engine.pause if held else self.bench.engine.resume)(job)

    @rule(passed_s=st.floats(0, 0.2))
    def time_passes(self, passed_s: float) -> None:
        self.bench.clock.now += passed_s

    @rule(launch=st.booleans())
    def something_will_fail(self, launch: bool) -> None:
        if launch:
            self.bench.device.fail_next_launch = True
        else:
            self.bench.device.fail_next_collect = True

    def note(self, events: list[Event]) -> None:
        for event in events:
            job = event.job
            assert any(job is one for one in self.alive), "something followed the end"
            stands = any(job is one for one in self.standing)
            if isinstance(event, JobTokens | JobStarted):
                assert not stands, "it went on while it was paused"
            if isinstance(event, JobTokens):
                self.answers[id(job)] += event.ids
            if isinstance(event, JobPaused | JobResumed):
                assert stands == isinstance(event, JobResumed)
                self.standing = [one for one in self.standing if one is not job]
                self.standing += [job] * isinstance(event, JobPaused)
            if isinstance(event, JobFinished):
                self.alive = [one for one in self.alive if one is not job]
                self.judge(job, event)

    def judge(self, job: Job, end: JobFinished) -> None:
        sampling = job.sampling
        expected = continuation(job.token_ids, sampling.max_tokens, ignore_eos=sampling.ignore_eos)
        answer = self.answers[id(job)]
        if NAN in job.token_ids:
            assert not answer
            if job.abort is None:
                assert end.code in ENDS_OF_NAN
            return
        assert end.code is not Code.NOT_FINITE
        assert answer == expected[: len(answer)], "not the tokens that it gets without overlap"
        assert end.completion_tokens == len(answer)
        if end.reason is FinishReason.LENGTH or (
            end.reason is FinishReason.STOP and job.abort is None
        ):
            assert answer == expected
        # The step under way when it was to end, and with overlap the one launched behind it.
        assert end.late_tokens <= (2 if self.overlap else 1)

    @invariant()
    def nothing_is_free_too_early(self) -> None:
        self.bench.check()

    def teardown(self) -> None:
        self.bench.device.fail_next_launch = self.bench.device.fail_next_collect = False
        for job in self.alive:
            self.bench.engine.resume(job)
        self.note(self.bench.finish())
        assert not self.alive
        assert self.bench.scheduler.pool.used_count == 0


class PlainMachine(OverlapMachine):
    overlap = False


TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestWithoutOverlap = PlainMachine.TestCase
TestWithoutOverlap.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    bench = Bench()
    bench.submit([9] * 3)
    assert bench.step() and bench.device.launches == 1
    events = bench.step()
    assert bench.device.launches == 2
    assert len([e for e in events if isinstance(e, JobTokens)]) == 1
    assert bench.device.most_uncollected == 2


def test_no_step_is_launched_past_the_limit() -> None:
    """The engine knows beforehand that the last token is the last."""
    bench = Bench()
    job = bench.submit([9] * 3, max_tokens=5)
    events = bench.finish()
    assert bench.device.launches == 5
    assert ids_of(job, events) == continuation([9] * 3, 5, ignore_eos=True)
    assert end_of(job, events).late_tokens == 0


def test_steps_that_are_launched_ahead_show_that_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that find none now and then are no sign of a device that is full."""
    bench, large = Bench(), list[Job]()
    launch = bench.device.launch

    def launch_what_fits(plan: Plan) -> LaunchedFake:
        if any(row.request.job in large for row in plan.rows):
            bench.device.run_all()
            raise MemoryError("out of memory")
        return launch(plan)

    monkeypatch.setattr(bench.device, "launch", launch_what_fits)
    for _ in range(4):
        large.append(bench.submit([9]))
        assert end_of(large[-1], bench.finish()).code is Code.NO_CAPACITY
        assert end_of(bench.submit([9, 10]), bench.finish()).code is None


def test_a_full_block_is_known_to_others_once_it_is_read() -> None:
    """WK-5: its content is certain then."""
    bench = Bench()
    first = bench.submit([9] * 9, max_tokens=10)
    bench.step()
    assert not list(bench.scheduler.pool.hashes)
    events = bench.finish()
    text = [9] * 9 + ids_of(first, events)
    again = bench.submit(text, max_tokens=2)
    end = end_of(again, bench.finish())
    # All but the last token were computed; the last block was not full.
    assert end.cached_tokens == (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_stopping_reads_what_was_launched() -> None:
    bench = Bench()
    job = bench.submit([9] * 3, max_tokens=30)
    events: list[Event] = []
    bench.engine._sink = events.extend
    bench.step(2)
    bench.engine.stop()
    assert end_of(job, events).code is Code.DRAINING
    assert not bench.device.uncollected and bench.device.closed
    assert bench.scheduler.pool.used_count == 0
