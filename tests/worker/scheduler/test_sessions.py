"""WK-9: conversations keep their KV between two turns, and nobody waits for it."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol import AbortCause, Sampling
from tests.support.engine import Bench, end_of
from worker.core import Job
from worker.scheduler.sessions import KeptSessions

KEEP_S = 30.0


class SessionBench(Bench):
    """Blocks of 4 tokens; half of them may be kept."""

    @property
    def sessions(self) -> KeptSessions:
        return self.scheduler.sessions

    def turn(self, session: str, prompt: list[int], *, keep_s: float = KEEP_S, new: int = 1) -> Job:
        sampling = Sampling(max_tokens=new, ignore_eos=True)
        job = Job(prompt, sampling, self.clock.now + 100, session=session, session_keep_s=keep_s)
        self.engine.submit(job)
        return job

    def cached_tokens(self, session: str, prompt: list[int], **options: float) -> int:
        job = self.turn(session, prompt, **options)  # type: ignore[arg-type]
        return end_of(job, self.finish()).cached_tokens


def text(first: int, tokens: int) -> list[int]:
    return [first, *range(10, 9 + tokens)]


def test_a_turn_goes_on_with_what_was_kept_whatever_came_between() -> None:
    bench = SessionBench(blocks=16)
    assert bench.cached_tokens("agent", text(3, 21)) == 0
    for number in range(20):
        bench.cached_tokens("", text(30 + number, 21))
    assert bench.cached_tokens("agent", text(3, 25)) == 20
    assert bench.engine.stats().sessions == 1
    assert bench.engine.stats().session_blocks == 6
    assert bench.is_clean


def test_without_a_keep_it_is_evicted_like_any_other() -> None:
    bench = SessionBench(blocks=16)
    bench.cached_tokens("agent", text(3, 21), keep_s=0)
    for number in range(20):
        bench.cached_tokens("", text(30 + number, 21))
    assert bench.cached_tokens("agent", text(3, 25), keep_s=0) == 0
    assert len(bench.sessions) == 0


def test_its_time_runs_from_the_end_of_its_last_turn() -> None:
    bench = SessionBench(blocks=16)
    bench.turn("agent", text(3, 21))
    bench.finish()
    bench.clock.now += KEEP_S - 1
    bench.turn("agent", text(3, 25))
    bench.finish()
    bench.clock.now += KEEP_S - 1
    bench.step()
    assert len(bench.sessions) == 1
    bench.clock.now += 1
    bench.step()
    assert (len(bench.sessions), bench.sessions.expired_total) == (0, 1)
    assert bench.sessions.next_expiry == math.inf
    assert bench.scheduler.pool.kept_count == 0
    assert bench.scheduler.pool.cached_count == 6


def test_it_is_not_given_up_while_its_next_turn_waits() -> None:
    bench = SessionBench(blocks=16, max_running=1)
    bench.cached_tokens("agent", text(3, 21))
    bench.runner.step_s = KEEP_S
    other = bench.turn("", text(4, 9), new=3)
    bench.step()
    turn = bench.turn("agent", text(3, 25))
    events = bench.finish()
    assert end_of(other, events).completion_tokens == 3
    assert end_of(turn, events).cached_tokens == 20


def test_running_work_gets_the_blocks_when_no_others_are_left() -> None:
    """Sessions make nobody wait: what is kept is free."""
    bench = SessionBench(blocks=16, context_tokens=1000)
    bench.cached_tokens("one", text(3, 13))
    bench.cached_tokens("two", text(4, 13))
    assert bench.engine.stats().kv_blocks_free == 16
    big = bench.turn("", text(5, 50), new=1)
    assert end_of(big, bench.finish()).wait_ms == 0
    stats = bench.engine.stats()
    assert stats.session_evicted_blocks_total == 3
    assert bench.cached_tokens("two", text(4, 17)) == 12
    # The least recently used one has paid.
    assert stats.session_blocks == 3


def test_the_least_recently_used_one_makes_room_within_the_share() -> None:
    bench = SessionBench(blocks=20, session_share=0.5)
    for name, first in (("one", 3), ("two", 4), ("three", 5)):
        bench.cached_tokens(name, text(first, 17))
        bench.step()
    assert (len(bench.sessions), bench.sessions.displaced_total) == (2, 1)
    assert bench.scheduler.pool.kept_hashes == 8
    assert bench.cached_tokens("one", text(3, 21)) == 16, "it is cached like any other still"


def test_of_a_long_one_the_head_is_kept() -> None:
    bench = SessionBench(blocks=20, session_share=0.2)
    bench.cached_tokens("long", text(3, 33))
    assert bench.scheduler.pool.kept_hashes == 4


def test_a_share_of_nothing_keeps_nothing() -> None:
    bench = SessionBench(blocks=20, session_share=0.0)
    bench.cached_tokens("agent", text(3, 21))
    assert (len(bench.sessions), bench.scheduler.pool.kept_hashes) == (0, 0)


def test_a_turn_that_was_stopped_early_does_not_shorten_what_is_kept() -> None:
    bench = SessionBench(blocks=32, max_running=1)
    bench.cached_tokens("agent", text(3, 21))
    bench.clock.now += 10
    blocker = bench.turn("", text(4, 5), new=20)
    bench.step()
    turn = bench.turn("agent", text(3, 25))
    bench.engine.cancel(turn, AbortCause.CANCEL)
    bench.step()
    assert bench.scheduler.pool.kept_hashes == 5
    bench.engine.cancel(blocker, AbortCause.CANCEL)
    bench.finish()
    assert bench.sessions.next_expiry <= bench.clock.now + KEEP_S


def test_equal_names_of_two_tenants_are_two_sessions() -> None:
    bench = SessionBench(blocks=32)
    for tenant in ("acme", "other"):
        job = Job(
            text(3, 21),
            Sampling(max_tokens=1),
            math.inf,
            session="agent",
            session_keep_s=KEEP_S,
            cache_salt=tenant,
        )
        bench.engine.submit(job)
    bench.finish()
    assert len(bench.sessions) == 2


class SessionMachine(RuleBasedStateMachine):
    """Turns, other work, cancels and time, in any order: blocks balance, the share is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = SessionBench(blocks=24, session_share=0.4)
        self.texts = {name: [first] for first, name in enumerate("abc", 3)}
        self.jobs: list[Job] = []

    @rule(name=st.sampled_from("abc"), new=st.integers(1, 9), keep_s=st.sampled_from([0, 5, 30]))
    def turn(self, name: str, new: int, keep_s: int) -> None:
        prompt = self.texts[name] = [*self.texts[name], *range(20, 20 + new)][:50]
        self.jobs.append(self.bench.turn(name, prompt, keep_s=keep_s))

    @rule(first=st.integers(40, 60), tokens=st.integers(2, 60))
    def other(self, first: int, tokens: int) -> None:
        self.jobs.append(self.bench.turn("", text(first, tokens)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.jobs:
            self.bench.engine.cancel(data.draw(st.sampled_from(self.jobs)), AbortCause.CANCEL)

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0]), steps=st.integers(1, 6))
    def pass_time(self, seconds: float, steps: int) -> None:
        self.bench.clock.now += seconds
        self.bench.step(steps)

    @invariant()
    def the_share_is_kept(self) -> None:
        pool = self.bench.scheduler.pool
        self.bench.scheduler.check_integrity()
        assert pool.kept_hashes <= 9
        assert pool.used_count + pool.free_count == pool.total
        assert bool(len(self.bench.sessions)) == bool(pool.kept_hashes)

    def teardown(self) -> None:
        self.bench.finish()
        self.bench.clock.now += 1000
        self.bench.step()
        assert self.bench.is_clean
        assert self.bench.scheduler.pool.kept_hashes == 0


TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
