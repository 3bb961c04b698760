"""WK-9: conversations keep their KV between two turns, and nobody waits for it."""

import math

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
    assert len(bench.sessions) == 0
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
    assert bench.cached_tokens("two", text(4, 17)) == 12
    # The least recently used one has paid.
    assert stats.session_blocks == 3


def test_the_least_recently_used_one_makes_room_within_the_share() -> None:
    bench = SessionBench(blocks=20)
    for name, first in (("one", 3), ("two", 4), ("three", 5)):
        bench.cached_tokens(name, text(first, 17))
        bench.step()
    assert len(bench.sessions) == 2
    assert bench.scheduler.pool.kept_hashes == 8
    assert bench.cached_tokens("one", text(3, 21)) == 16, "it is cached like any other still"


def test_of_a_long_one_the_head_is_kept() -> None:
    bench = SessionBench(blocks=10)
    bench.cached_tokens("long", text(3, 33))
    assert bench.scheduler.pool.kept_hashes == 5


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
