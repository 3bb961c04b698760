"""Deadlines, aborts and accounts over an engine that others wrote."""

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from protocol import (
    AbortCause,
    Code,
    Feature,
    FinishReason,
    OnDeadline,
    Pooling,
    PromptLogprobs,
    Sampling,
    TokenLogprob,
)
from tests.support.backend import SteppedBench
from tests.support.engine import EOS, end_of, ids_of, was_started
from tests.worker.engine.test_engine_thread import Collector
from worker.core import Job, JobFinished, JobPaused, JobPrompt, JobResumed, JobTokens
from worker.engines.stepped import LONGEST_LEAVE_S, Produced
from worker.grammar.constraint import Constraint
from worker.scheduler.config import MAX_PAUSES


def warm(bench: SteppedBench, tokens: int = 56) -> None:
    """Until the engine knows how fast steps are at the least."""
    for _ in range(3):
        bench.submit(3, max_tokens=tokens)
        bench.finish()


def test_a_job_starts_speaks_and_ends_once() -> None:
    bench = SteppedBench()
    job = bench.submit(5, max_tokens=4)
    events = bench.finish()
    end = end_of(job, events)
    assert was_started(job, events)
    assert ids_of(job, events) == [7] * 4
    assert (end.reason, end.code, end.prompt_tokens, end.completion_tokens) == (
        FinishReason.LENGTH,
        None,
        5,
        4,
    )
    assert end.prefill_ms == pytest.approx(10) and end.decode_ms == pytest.approx(30)
    assert end.left_ms == pytest.approx(100_000 - 40)
    assert end.abort_ms is None


def test_the_end_token_is_told_and_nothing_after_it() -> None:
    """Whether or not the backend itself stops there."""
    for ends_jobs in (True, False):
        bench = SteppedBench()
        bench.core.ends_jobs = ends_jobs
        bench.core.answer = lambda handle, job: Produced(handle, [5, EOS, 6])
        job = bench.submit(max_tokens=9)
        events = bench.finish()
        assert ids_of(job, events) == [5, EOS]
        assert end_of(job, events).reason is FinishReason.STOP
        assert not bench.core.jobs and not bench.core.going


def test_max_tokens_holds_whatever_the_backend_gives() -> None:
    bench = SteppedBench()
    bench.core.ends_jobs = False
    bench.core.answer = lambda handle, job: Produced(
        handle, [7, 8, 9], [TokenLogprob(-1.0), TokenLogprob(-2.0), TokenLogprob(-3.0)]
    )
    job = bench.submit(max_tokens=5, logprobs=0)
    events = bench.finish()
    assert ids_of(job, events) == [7, 8, 9, 7, 8]
    told = [event.logprobs or [] for event in events if isinstance(event, JobTokens)]
    assert [len(one) for one in told] == [3, 2]
    assert end_of(job, events).reason is FinishReason.LENGTH


def test_the_context_bounds_the_answer_and_refuses_the_prompt() -> None:
    bench = SteppedBench(full_context_tokens=128)
    fits, long = bench.submit(60, max_tokens=50), bench.submit(64)
    events = bench.finish()
    assert end_of(fits, events).completion_tokens == 4
    end = end_of(long, events)
    assert end.code is Code.CONTEXT_OVERFLOW
    assert "maximum context length is 64 tokens" in end.message
    assert "own context is 128" in end.message


def test_no_more_run_than_may_and_no_more_wait_than_may() -> None:
    bench = SteppedBench(max_running=2, max_waiting=3)
    jobs = [bench.submit() for _ in range(7)]
    events = bench.step()
    assert sum(was_started(job, events) for job in jobs) == 2
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting) == (2, 3)
    events += bench.finish()
    codes = [end_of(job, events).code for job in jobs]
    assert codes == [None] * 5 + [Code.NO_CAPACITY] * 2


def test_least_slack_starts_first() -> None:
    bench = SteppedBench(max_running=1)
    first = bench.submit()
    bench.step()
    late, soon, sooner = (bench.submit(left_s=left_s) for left_s in (50.0, 20.0, 10.0))
    first_token = bench.submit(left_s=60.0, first_token_s=5.0)
    bench.finish()
    assert bench.core.order == [first, first_token, sooner, soon, late]


def test_dl3_too_little_left_to_start() -> None:
    bench = SteppedBench(max_running=1)
    bench.core.step_s = 0.05
    at_once = bench.submit(left_s=0.1)
    ahead = bench.submit(max_tokens=50)
    events = bench.step()
    waited = bench.submit(left_s=1.0)
    events += bench.finish()
    for job in (at_once, waited):
        end = end_of(job, events)
        assert end.code is Code.DEADLINE_EXCEEDED and "too little time" in end.message
        assert not was_started(job, events) and job not in bench.core.order
    assert end_of(ahead, events).code is None


@pytest.mark.parametrize("frees_at_once", [True, False])
def test_a_deadline_ends_a_job_within_a_step(frees_at_once: bool) -> None:
    bench = SteppedBench(frees_at_once=frees_at_once)
    job = bench.submit(left_s=0.245, max_tokens=60)
    events = bench.finish()
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
    assert end.completion_tokens == len(ids_of(job, events)) == 24
    assert end.late_tokens == 1
    assert end.abort_ms == pytest.approx(5)
    assert bench.engine.stats().late_tokens_total == 1
    assert not bench.core.jobs and not bench.core.going


@pytest.mark.parametrize("frees_at_once", [True, False])
def test_dl6_partial_ends_cleanly_before_the_deadline(frees_at_once: bool) -> None:
    bench = SteppedBench(frees_at_once=frees_at_once)
    warm(bench)
    job = bench.submit(left_s=0.3, max_tokens=60, on_deadline=OnDeadline.PARTIAL)
    events = bench.finish()
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.DEADLINE, None)
    assert end.completion_tokens >= 20
    assert end.left_ms >= 0 and end.late_tokens == 0


def test_dl3_certain_work_that_no_longer_fits_ends_at_once() -> None:
    bench = SteppedBench()
    warm(bench)
    stated = bench.submit(left_s=0.2, max_tokens=60, ignore_eos=True)
    least = bench.submit(left_s=0.2, max_tokens=60, min_tokens=50)
    free = bench.submit(left_s=0.2, max_tokens=60)
    events = bench.step(3)
    for job in (stated, least):
        end = end_of(job, events)
        assert end.code is Code.DEADLINE_EXCEEDED and "no longer fit" in end.message
        assert end.left_ms > 100
    assert not any(isinstance(e, JobFinished) and e.job is free for e in events)


def test_dl17_one_that_keeps_on_is_spared_until_its_deadline() -> None:
    bench = SteppedBench()
    warm(bench)
    job = bench.submit(left_s=0.2, max_tokens=60, ignore_eos=True, keeps_on=True)
    events = bench.finish()
    end = end_of(job, events)
    assert end.spared and end.left_ms <= 0
    assert end.completion_tokens >= 15


@pytest.mark.parametrize("frees_at_once", [True, False])
def test_dl4_a_cancelled_job_is_gone_after_the_step_under_way(frees_at_once: bool) -> None:
    bench = SteppedBench(frees_at_once=frees_at_once, max_running=1)
    job, after = bench.submit(max_tokens=50), bench.submit(max_tokens=2)
    events = bench.step(3)
    bench.core.during = lambda: bench.engine.cancel(job, AbortCause.DISCONNECT)
    events += bench.step()
    bench.core.during = lambda: None
    events += bench.finish()
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.CANCELLED, Code.CLIENT_DISCONNECTED)
    assert end.completion_tokens == 3 and end.late_tokens == 1
    assert end.abort_ms == pytest.approx(0)  # nothing else ran, so it was not waited for
    assert end_of(after, events).completion_tokens == 2


def test_a_slot_that_is_not_free_yet_is_given_to_nobody() -> None:
    """``FakeCore.add`` asserts it; the others' step comes first."""
    bench = SteppedBench(max_running=2)
    stays, goes = bench.submit(max_tokens=9), bench.submit(max_tokens=9)
    events = bench.step()
    after = bench.submit(max_tokens=2)
    bench.engine.cancel(goes, AbortCause.CANCEL)
    events += bench.step()
    assert end_of(goes, events).abort_ms == pytest.approx(10)
    assert not was_started(after, events)
    events += bench.finish()
    assert end_of(after, events).code is None and end_of(stays, events).completion_tokens == 9


def test_jobs_cancelled_before_they_run_end_and_never_start() -> None:
    bench = SteppedBench(max_running=1)
    running, waiting = bench.submit(), bench.submit()
    events = bench.step()
    fresh = bench.submit()
    for job in (waiting, fresh):
        bench.engine.cancel(job, AbortCause.CANCEL)
        bench.engine.cancel(job, AbortCause.LANE_LOST)  # the first cause wins
    events += bench.step()
    for job in (waiting, fresh):
        assert end_of(job, events).code is Code.CANCELLED
        assert not was_started(job, events)
    events += bench.finish()
    assert end_of(running, events).code is None


def test_a_stop_string_is_no_abort_and_wastes_nothing() -> None:
    bench = SteppedBench()
    job = bench.submit(max_tokens=20)
    events = bench.step(2)
    bench.engine.cancel(job, AbortCause.STOP_STRING)
    events += bench.finish()
    end = end_of(job, events)
    assert (end.reason, end.code, end.late_tokens) == (FinishReason.STOP, None, 0)


def test_an_error_of_the_backend_ends_one_job() -> None:
    bench = SteppedBench()
    bad, good = bench.submit(4), bench.submit(5)

    def answer(handle: int, job: Job) -> Produced:
        if job is bad:
            return Produced(handle, end=FinishReason.ERROR, message="no such thing")
        return Produced(handle, [7])

    bench.core.answer = answer
    events = bench.finish()
    end = end_of(bad, events)
    assert (end.reason, end.code, end.message) == (
        FinishReason.ERROR,
        Code.ENGINE_ERROR,
        "no such thing",
    )
    assert end_of(good, events).code is None


def test_what_the_backend_does_not_take_up_is_refused_with_its_words() -> None:
    bench = SteppedBench()
    bench.core.refuses = True
    job = bench.submit()
    end = end_of(job, bench.finish())
    assert (end.code, end.message) == (Code.INVALID_REQUEST, "not this one")


def test_a_job_that_a_backend_cannot_stomach_costs_nobody_else_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else one request would end engine after engine: orchestrators try the next instance."""
    bench = SteppedBench()
    good, bad = bench.submit(4), bench.submit(5)
    add = bench.core.add

    def fragile(handle: int, job: Job, max_tokens: int) -> None:
        add(handle, job, max_tokens)
        if job is bad:
            raise TypeError("a secret of the prompt's")

    bench.core.add = fragile  # type: ignore[method-assign]
    events = bench.finish()
    end = end_of(bad, events)
    assert end.code is Code.ENGINE_ERROR and "secret" not in end.message
    assert not was_started(bad, events) and not bench.core.jobs
    assert end_of(good, events).code is None
    assert "could not take up a job: TypeError at" in caplog.text
    assert "secret" not in caplog.text


def test_what_the_engine_lacks_is_refused_by_name() -> None:
    bench = SteppedBench(lacks=[Feature.MIN_P, Feature.EMBEDDINGS, Feature.GRAMMAR])
    drawn, plain = bench.submit(min_p=0.1), bench.submit()
    embeds = Job([1], Sampling(max_tokens=1), 100.0, pooling=Pooling.LAST)
    bench.engine.submit(embeds)
    constrained = Job([1], Sampling(max_tokens=1), 100.0, constraint=Constraint())
    bench.engine.submit(constrained)
    events = bench.finish()
    assert end_of(plain, events).code is None
    for job, name in ((drawn, "min_p"), (embeds, "embeddings"), (constrained, "grammar")):
        end = end_of(job, events)
        assert end.code is Code.INVALID_REQUEST and f"no {name};" in end.message


def test_a_job_with_a_grammar_starts_when_that_is_ready() -> None:
    bench = SteppedBench()
    good, bad = Constraint(), Constraint()
    jobs = [Job([1], Sampling(max_tokens=2), 100.0, constraint=one) for one in (good, bad)]
    for job in jobs:
        bench.engine.submit(job)
    events = bench.step(2)
    assert not any(was_started(job, events) for job in jobs)
    good.resolve(None)
    bad.resolve(None, "it is none")
    events += bench.finish()
    assert end_of(jobs[0], events).completion_tokens == 2
    assert (end_of(jobs[1], events).code, end_of(jobs[1], events).message) == (
        Code.INVALID_REQUEST,
        "it is none",
    )
    assert good.is_dropped and bad.is_dropped


def test_a_prompt_is_read_and_nothing_generated() -> None:
    bench = SteppedBench()
    piece = PromptLogprobs.pack(1, [TokenLogprob(-1.0, [], 1)])
    bench.core.answer = lambda handle, job: Produced(handle, [7], prompt=piece)
    job = bench.submit(2, max_tokens=0, prompt_logprobs=0)
    events = bench.finish()
    assert [e.logprobs for e in events if isinstance(e, JobPrompt)] == [piece]
    assert ids_of(job, events) == []
    end = end_of(job, events)
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 0)


def test_a_paused_job_leaves_its_slot_and_goes_on_with_its_next_token() -> None:
    bench = SteppedBench(max_running=1)
    long = bench.submit(max_tokens=6)
    events = bench.step(2)
    short = bench.submit(max_tokens=2)
    bench.engine.pause(long)
    events += bench.step(4)
    assert JobPaused(long) in events and JobResumed(long) not in events
    assert ids_of(short, events) == [7, 7] and len(ids_of(long, events)) == 2
    bench.engine.resume(long)
    events += bench.finish()
    assert ids_of(long, events) == [7] * 6
    assert sum(was_started(long, [event]) for event in events) == 1, "it started once"
    assert end_of(long, events).code is None


def test_a_paused_job_is_ended_by_its_deadline_and_by_a_cancel_without_a_step() -> None:
    bench = SteppedBench()
    late, unwanted = bench.submit(left_s=1.0), bench.submit()
    bench.step()
    for job in (late, unwanted):
        bench.engine.pause(job)
    bench.step()
    steps = bench.core.steps
    bench.engine.cancel(unwanted, AbortCause.CANCEL)
    assert end_of(unwanted, bench.step()).code is Code.CANCELLED
    bench.clock.now += 1.0
    assert end_of(late, bench.step()).code is Code.DEADLINE_EXCEEDED
    assert bench.core.steps == steps and not bench.core.paused
    assert not bench.engine.has_work


def test_a_pause_waits_for_the_step_under_way_and_may_be_taken_back() -> None:
    bench = SteppedBench()
    first, second, waiting = bench.submit(), bench.submit(), bench.submit()
    bench.engine.pause(waiting)
    bench.core.is_busy = True
    events = bench.step()
    assert JobPaused(waiting) in events and not was_started(waiting, events)
    for job in (first, second):
        bench.engine.pause(job)
    events = bench.step()
    bench.engine.resume(first)
    bench.core.is_busy = False
    events += bench.step()
    assert JobPaused(second) in events and JobPaused(first) not in events
    for job in (second, waiting):
        bench.engine.resume(job)
    assert end_of(waiting, bench.finish()).code is None


def test_pauses_are_ignored_where_the_backend_cannot_and_where_they_are_too_many() -> None:
    bench = SteppedBench(can_pause=False)
    job = bench.submit(max_tokens=3)
    bench.engine.pause(job)
    assert end_of(job, bench.finish()).completion_tokens == 3
    bench = SteppedBench()
    job = bench.submit(max_tokens=12)
    events = bench.step()
    for _ in range(2 * MAX_PAUSES):
        bench.engine.pause(job)
        events += bench.step()
        bench.engine.resume(job)
        events += bench.step()
    events += bench.finish()
    assert events.count(JobPaused(job)) == events.count(JobResumed(job)) == MAX_PAUSES
    assert len(ids_of(job, events)) == 12


def test_a_job_ends_when_the_backend_has_let_go_of_its_memory_or_too_late() -> None:
    bench = SteppedBench(max_running=1)
    first = bench.submit(max_tokens=20)
    bench.step()
    second = bench.submit(max_tokens=2)
    bench.core.stuck = {1, 2}
    bench.engine.cancel(first, AbortCause.CANCEL)
    events = bench.step(3)
    assert not any(isinstance(event, JobFinished) for event in events)
    assert not was_started(second, events), "its slot is still taken"
    bench.core.stuck = {2}
    events += bench.finish()
    assert end_of(first, events).code is Code.CANCELLED and end_of(second, events).code is None
    stuck = bench.submit(max_tokens=20)
    bench.step()
    bench.core.stuck = {3}
    bench.engine.cancel(stuck, AbortCause.CANCEL)
    assert not any(isinstance(event, JobFinished) for event in bench.step())
    bench.clock.now += LONGEST_LEAVE_S
    assert end_of(stuck, bench.step()).code is Code.CANCELLED


def test_a_backend_that_fails_while_there_is_no_work_is_found_out() -> None:
    bench = SteppedBench()
    assert not bench.engine.has_failed
    bench.core.has_failed = True
    assert bench.engine.has_failed


def test_time_in_which_every_job_is_paused_is_no_step() -> None:
    bench = SteppedBench()
    warm(bench)
    job = bench.submit()
    bench.step()
    before = bench.engine.stats()
    bench.engine.pause(job)
    bench.step()
    bench.clock.now += 50.0
    bench.engine.resume(job)
    bench.finish()
    after = bench.engine.stats()
    assert after.busy_ms_total - before.busy_ms_total < 1000


def test_statistics_add_up() -> None:
    bench = SteppedBench()
    jobs = [bench.submit(n, max_tokens=n) for n in (3, 4, 5)]

    def answer(handle: int, job: Job) -> Produced:
        return Produced(handle, [7], cached_tokens=2)

    bench.core.answer = answer
    events = bench.finish()
    stats = bench.engine.stats()
    ends = [end_of(job, events) for job in jobs]
    assert stats.tokens_total == sum(end.completion_tokens for end in ends) == 12
    assert (stats.jobs_total, stats.running, stats.waiting) == (3, 0, 0)
    assert stats.steps_total == bench.core.steps == 5
    assert stats.busy_ms_total == pytest.approx(50)
    assert stats.step_ms == pytest.approx(10)
    assert stats.prefill_tokens_total == 12
    assert [end.cached_tokens for end in ends] == [2, 2, 2] and stats.cached_tokens_total == 6
    assert (stats.kv_blocks_total, stats.kv_blocks_used, stats.kv_blocks_free) == (64, 0, 64)


def test_idle_time_is_no_step() -> None:
    bench = SteppedBench()
    for _ in range(3):
        bench.submit(max_tokens=3)
        bench.finish()
        bench.clock.now += 5.0
    assert bench.engine.stats().step_ms == pytest.approx(10)


def test_a_backend_waits_no_longer_than_to_the_next_deadline() -> None:
    bench = SteppedBench()
    bench.submit(left_s=50.0)
    bench.step()
    bench.submit(left_s=0.15)
    bench.clock.now += 0.02
    bench.step()
    bench.clock.now += 0.07
    bench.step()
    assert bench.core.waits == pytest.approx([0.1, 0.1, bench.core.waits[2]])
    assert 0.02 < bench.core.waits[2] < 0.05, "less a step that may be slow"


# ── on its own thread ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def threaded() -> SteppedBench:
    return SteppedBench()


def submitted(bench: SteppedBench, count: int) -> list[Job]:
    jobs = [Job([1, 2], Sampling(max_tokens=8), 1e9) for _ in range(count)]
    threads = [threading.Thread(target=bench.engine.submit, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    return jobs


def test_jobs_of_many_threads_all_end_once(threaded: SteppedBench) -> None:
    sink = Collector()
    threaded.engine.start(sink)
    jobs = submitted(threaded, 8)
    sink.wait_ended(8)
    threaded.engine.stop()
    threaded.engine.stop()
    assert all(end_of(job, sink.events).reason is FinishReason.LENGTH for job in jobs)
    assert threaded.core.closed == 1
    assert threaded.core.interrupts >= 8


def hold_in_a_step(bench: SteppedBench) -> tuple[threading.Event, Callable[[], None]]:
    entered, gate = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert gate.wait(60)

    bench.core.during = block
    return entered, gate.set


def test_stop_ends_everything_as_drained(threaded: SteppedBench) -> None:
    sink = Collector()
    entered, release = hold_in_a_step(threaded)
    threaded.engine.start(sink)
    jobs = submitted(threaded, 8)
    assert entered.wait(60)
    stopping = threading.Thread(target=threaded.engine.stop)
    stopping.start()
    release()
    stopping.join(60)
    after = Job([1], Sampling(max_tokens=1), 1e9)
    threaded.engine.submit(after)
    for job in [*jobs, after]:
        end = end_of(job, sink.events)
        assert end.code in (None, Code.DRAINING)
    assert end_of(after, sink.events).code is Code.DRAINING
    assert threaded.core.closed == 1 and not threaded.core.jobs
    assert threaded.engine.stats().running == 0


def test_a_backend_that_fails_ends_all_jobs_and_no_more_are_taken(
    threaded: SteppedBench, caplog: pytest.LogCaptureFixture
) -> None:
    """With codes that have orchestrators try elsewhere, as our own engine's: those that ran with
    the one that counts, since one of them may be what it failed of."""
    sink = Collector()
    threaded.core.fails = True
    jobs = submitted(threaded, 6)
    threaded.engine.start(sink)
    sink.wait_ended(6)
    codes = [end_of(job, sink.events).code for job in jobs]
    assert Counter(codes) == {Code.INSTANCE_LOST: 4, Code.DRAINING: 2}
    late = Job([1], Sampling(max_tokens=1), 1e9)
    threaded.engine.submit(late)
    sink.wait_ended(7)
    assert end_of(late, sink.events).code is Code.DRAINING
    assert "accepting no more" in caplog.text and threaded.engine.has_failed
    threaded.engine.stop()
    assert threaded.core.closed == 1


def test_an_engine_says_since_when_it_is_in_a_step(threaded: SteppedBench) -> None:
    sink = Collector()
    entered, gate = threading.Event(), threading.Event()

    def block() -> None:
        if threaded.core.steps == 3:
            entered.set()
            gate.wait(60)

    threaded.core.during = block
    engine = threaded.engine
    assert engine.step_under_way is None
    engine.start(sink)
    submitted(threaded, 1)
    assert entered.wait(60)
    step = engine.step_under_way
    assert step is not None and engine.step_under_way == step
    assert step.usual_s >= threaded.core.step_s
    gate.set()
    sink.wait_ended(1)
    engine.stop()
    assert engine.step_under_way is None
