"""What a job gets of every engine: one suite over the loop on each kind of backend (DL-3, DL-4)."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from protocol import AbortCause, Code, FinishReason, OnDeadline, Sampling, TokenLogprob
from tests.support.backend import SteppedBench
from tests.support.engine import EOS, Bench, end_of, ids_of, was_started
from tests.worker.engine.test_engine_thread import PATIENCE_S, Collector
from worker.core import Event, Job, JobFinished, JobPaused, JobResumed, JobTokens
from worker.grammar.constraint import Constraint

KINDS: dict[str, Callable[..., Bench]] = {
    "ours": Bench,
    "a core": SteppedBench,
    "a core that frees at once": partial(SteppedBench, frees_at_once=True),
}
STEP_S = 0.01
ABORTS = [
    (AbortCause.CANCEL, Code.CANCELLED),
    (AbortCause.DISCONNECT, Code.CLIENT_DISCONNECTED),
    (AbortCause.LANE_LOST, Code.CLIENT_DISCONNECTED),
    (AbortCause.DRAIN, Code.DRAINING),
]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[..., Bench]:
    kind = KINDS[request.param]

    def build(**changes: Any) -> Bench:
        bench = kind(**changes)
        bench.takes(STEP_S)
        return bench

    return build


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


def warm(bench: Bench) -> None:
    """Until the engine knows how fast steps are at the least."""
    for _ in range(3):
        bench.submit(max_tokens=56)
        bench.finish()


def test_a_job_runs_to_its_length(bench: Bench) -> None:
    job = bench.submit(max_tokens=5)
    events = bench.finish()
    end = end_of(job, events)
    assert was_started(job, events) and ids_of(job, events) == [7] * 5
    assert (end.reason, end.code, end.message) == (FinishReason.LENGTH, None, "")
    assert (end.prompt_tokens, end.completion_tokens, end.late_tokens) == (3, 5, 0)
    assert (end.wait_ms, end.prefill_ms) == pytest.approx((0, 10))
    assert (end.decode_ms, end.left_ms) == pytest.approx((40, 99_950))
    assert end.abort_ms is None and bench.is_clean


@pytest.mark.parametrize(
    ("asked", "ids", "reason"),
    [
        ({"max_tokens": 5}, [7, EOS], FinishReason.STOP),
        ({"max_tokens": 2}, [7, EOS], FinishReason.STOP),
        ({"max_tokens": 1}, [7], FinishReason.LENGTH),
        ({"max_tokens": 5, "ignore_eos": True}, [7, EOS, 8, 7, EOS], FinishReason.LENGTH),
        ({"max_tokens": 5, "stop_token_ids": (8,), "ignore_eos": True}, [7, EOS, 8], "stop"),
        ({"max_tokens": 0}, [], FinishReason.LENGTH),
    ],
)
def test_a_text_ends_with_its_end_token_or_at_its_length(
    bench: Bench, asked: dict[str, Any], ids: list[int], reason: FinishReason
) -> None:
    """Whatever a step gives, and whether or not a core itself stops there."""
    logprobs = [TokenLogprob(-1.0), TokenLogprob(-2.0), TokenLogprob(-3.0)]
    bench.says([7, EOS, 8], logprobs)
    if isinstance(bench, SteppedBench):
        bench.core.ends_jobs = False
    job = bench.submit(logprobs=0, **asked)
    events = bench.finish()
    assert ids_of(job, events) == ids
    end = end_of(job, events)
    assert (end.reason, end.completion_tokens) == (reason, len(ids))
    told = [one for e in events if isinstance(e, JobTokens) for one in e.logprobs or []]
    assert told == (2 * logprobs)[: len(ids)]
    assert bench.is_clean


def test_the_context_bounds_the_answer_and_refuses_the_prompt(bench: Bench) -> None:
    fits, long = bench.submit(60, max_tokens=50), bench.submit(64)
    outside = [bench.submit(ids) for ids in ([], [1, 100], [3, -1])]
    events = bench.finish()
    assert end_of(fits, events).completion_tokens == 4
    assert end_of(long, events).code is Code.CONTEXT_OVERFLOW
    assert "maximum context length is 64 tokens" in end_of(long, events).message
    assert {end_of(job, events).code for job in outside} == {Code.INVALID_REQUEST}


def test_no_more_run_than_may_and_no_more_wait_than_may(make: Callable[..., Bench]) -> None:
    bench = make(max_running=2, max_waiting=3)
    jobs = [bench.submit(left_s=100 + i) for i in range(7)]
    events = bench.step()
    assert [was_started(job, events) for job in jobs] == [True] * 2 + [False] * 5
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.jobs_total) == (2, 3, 7)
    events += bench.finish()
    codes = [end_of(job, events).code for job in jobs]
    assert codes == [None] * 5 + [Code.NO_CAPACITY] * 2


def test_least_slack_starts_first(make: Callable[..., Bench]) -> None:
    bench = make(max_running=1)
    bench.submit()
    bench.step()
    late, soon, sooner = (bench.submit(left_s=left_s) for left_s in (50.0, 20.0, 10.0))
    first_token = bench.submit(left_s=60.0, first_token_s=5.0)
    order = [event.job for event in bench.finish() if was_started(event.job, [event])]
    assert order == [first_token, sooner, soon, late]


# ── deadlines ────────────────────────────────────────────────────────────────────────────────


def test_dl3_too_little_left_to_start(make: Callable[..., Bench]) -> None:
    bench = make(max_running=1)
    bench.takes(0.05)
    at_once, ahead = bench.submit(left_s=0.1), bench.submit(max_tokens=50)
    events = bench.step()
    waited = bench.submit(left_s=1.0)
    events += bench.finish()
    for job in (at_once, waited):
        end = end_of(job, events)
        assert end.code is Code.DEADLINE_EXCEEDED and "too little time" in end.message
        assert not was_started(job, events)
    assert end_of(waited, events).left_ms == pytest.approx(100)
    assert end_of(ahead, events).code is None


def test_dl4_a_deadline_ends_a_job_within_a_step(bench: Bench) -> None:
    job = bench.submit(left_s=0.245, max_tokens=60)
    events = bench.finish()
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
    assert end.completion_tokens == len(ids_of(job, events)) == 24
    assert end.late_tokens == bench.engine.stats().late_tokens_total == 1
    assert (end.abort_ms, end.left_ms) == pytest.approx((5, -5))
    assert bench.is_clean


@pytest.mark.parametrize("slower", [False, True])
def test_dl6_partial_ends_cleanly_before_the_deadline(bench: Bench, slower: bool) -> None:
    """And stays clean where a step is slower than ever."""
    warm(bench)
    job = bench.submit(left_s=0.3, max_tokens=60, on_deadline=OnDeadline.PARTIAL)
    events = bench.step(22)
    bench.takes(5.0 if slower else STEP_S)
    events += bench.finish()
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.DEADLINE, None)
    assert end.completion_tokens >= 20 and (end.left_ms < 0) == slower
    assert end.late_tokens == slower and bench.is_clean


def test_dl3_certain_work_that_no_longer_fits_ends_at_once(make: Callable[..., Bench]) -> None:
    """It shrinks with every token, and waits for nobody."""
    bench = make(max_running=4)
    warm(bench)
    sampled: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"min_tokens": 50},
        {"ignore_eos": True, "stop": ("x",)},
        {},
    ]
    jobs = [bench.submit(left_s=0.2, max_tokens=60, **asked) for asked in sampled]
    waiting = bench.submit(left_s=0.21, max_tokens=60, min_tokens=50)
    events = bench.step(3)
    for job in (*jobs[:2], waiting):
        end = end_of(job, events)
        assert end.code is Code.DEADLINE_EXCEEDED and "no longer fit" in end.message
        assert end.left_ms > 100
    assert not was_started(waiting, events)
    assert not any(isinstance(e, JobFinished) and e.job in jobs[2:] for e in events)
    bench.finish()
    fits = bench.submit(max_tokens=20, left_s=0.215, ignore_eos=True)
    assert end_of(fits, bench.finish()).reason is FinishReason.LENGTH


def test_dl17_one_that_keeps_on_is_spared_until_its_deadline(bench: Bench) -> None:
    warm(bench)
    job = bench.submit(left_s=0.2, max_tokens=60, ignore_eos=True, keeps_on=True)
    end = end_of(job, bench.finish())
    assert end.spared and end.left_ms <= 0 and end.completion_tokens >= 15


# ── aborts ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("cause", "code"), ABORTS)
def test_dl4_an_abort_ends_a_job_and_frees_its_slot(
    make: Callable[..., Bench], cause: AbortCause, code: Code
) -> None:
    """WP-4, WP-5: running, waiting, or not seen yet; the first cause wins."""
    bench = make(max_running=2)
    running, stays = bench.submit(max_tokens=20), bench.submit(max_tokens=20)
    waiting = bench.submit(left_s=200)
    before = bench.step(3)
    fresh = bench.submit(left_s=300)
    for job in (running, waiting, fresh):
        bench.engine.cancel(job, cause)
        bench.engine.cancel(job, AbortCause.STOP_STRING)
    after = bench.submit(max_tokens=2, left_s=400)
    bench.clock.now += 0.004
    events = bench.step()
    for job in (running, waiting, fresh):
        end = end_of(job, events)
        assert (end.reason, end.code) == (FinishReason.CANCELLED, code)
        assert (end.completion_tokens, end.late_tokens) == (len(ids_of(job, before)), 0)
        assert end.abort_ms is not None and end.abort_ms <= 14.001
        assert ids_of(job, events) == [] and was_started(job, before) == (job is running)
        bench.engine.cancel(job, AbortCause.CANCEL)
    events += bench.finish()
    assert end_of(after, events).code is None and len(ids_of(stays, before + events)) == 20
    assert bench.is_clean


@pytest.mark.parametrize("cause", [AbortCause.CANCEL, AbortCause.STOP_STRING])
def test_dl10_a_token_computed_during_an_abort_is_not_published(
    bench: Bench, cause: AbortCause
) -> None:
    """It is late, and counted apart, except behind a stop string."""
    job = bench.submit(max_tokens=50)
    bench.step(2)
    bench.meanwhile(lambda: bench.engine.cancel(job, cause))
    events = bench.finish()
    end, is_stop = end_of(job, events), cause is AbortCause.STOP_STRING
    assert end.reason is (FinishReason.STOP if is_stop else FinishReason.CANCELLED)
    assert ids_of(job, events) == [] and end.completion_tokens == 2
    stats = bench.engine.stats()
    assert end.late_tokens == stats.late_tokens_total == (not is_stop)
    assert stats.tokens_total == 2 and bench.is_clean


def test_who_hears_of_an_end_finds_it_in_the_statistics(bench: Bench) -> None:
    """Else the orchestrator takes the job for somebody else's, and its slot for taken."""
    job = bench.submit(max_tokens=50)
    bench.submit(max_tokens=50)
    bench.step(2)
    heard: list[tuple[int, int]] = []

    def hear(events: list[Event]) -> None:
        ends = sum(isinstance(event, JobFinished) for event in events)
        heard.append((ends, bench.engine.stats().running))

    bench.engine.connect(hear)
    bench.engine.cancel(job, AbortCause.CANCEL)
    for _ in range(2):
        if events := bench.step():
            hear(events)
    assert (1, 1) in heard and (1, 2) not in heard


def test_a_job_with_a_grammar_starts_when_that_is_ready(bench: Bench) -> None:
    good, bad, failing = Constraint(), Constraint(), Constraint()
    jobs = [bench.submit(max_tokens=2, constraint=one) for one in (good, bad, failing)]
    events = bench.step(2)
    assert not any(was_started(job, events) for job in jobs)
    good.resolve(None)
    bad.resolve(None, "it is none")
    failing.resolve(None)
    events += bench.step()
    failing.error = "no mask could be made"
    events += bench.finish()
    ends = [end_of(job, events) for job in jobs]
    assert ends[0].completion_tokens == 2 and ends[2].completion_tokens == 1
    assert [end.message for end in ends] == ["", "it is none", "no mask could be made"]
    assert ends[1].code is ends[2].code is Code.INVALID_REQUEST
    assert good.is_dropped and bad.is_dropped and bench.is_clean


# ── pauses ───────────────────────────────────────────────────────────────────────────────────


def test_a_paused_job_leaves_its_slot_and_goes_on_with_its_next_token(
    make: Callable[..., Bench],
) -> None:
    bench = make(max_running=1)
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
    assert end_of(long, events).code is None and bench.is_clean


def test_a_paused_job_is_ended_by_its_deadline_and_by_a_cancel(bench: Bench) -> None:
    late, unwanted = bench.submit(left_s=1.0), bench.submit()
    bench.step()
    for job in (late, unwanted):
        bench.engine.pause(job)
    bench.step()
    steps = bench.engine.stats().steps_total
    bench.engine.cancel(unwanted, AbortCause.CANCEL)
    assert end_of(unwanted, bench.step()).code is Code.CANCELLED
    bench.clock.now += 1.0
    assert end_of(late, bench.step()).code is Code.DEADLINE_EXCEEDED
    assert bench.engine.stats().steps_total == steps and bench.is_clean


def test_a_waiting_job_is_held_back_and_a_pause_may_be_taken_back(bench: Bench) -> None:
    going = bench.submit(max_tokens=8)
    events = bench.step()
    held = bench.submit()
    bench.engine.pause(held)
    bench.engine.pause(going)
    bench.engine.resume(going)
    events += bench.step(6)
    assert JobPaused(held) in events and JobPaused(going) not in events
    assert not was_started(held, events)
    bench.engine.resume(held)
    assert end_of(held, bench.finish()).reason is FinishReason.LENGTH


def test_dl19_a_job_is_paused_as_often_as_it_is_asked_to(bench: Bench) -> None:
    """Asking twice changes nothing."""
    job = bench.submit(max_tokens=40)
    events = bench.step()
    for _ in range(8):
        for ask in (bench.engine.pause, bench.engine.resume):
            ask(job)
            ask(job)
            events += bench.step()
    assert events.count(JobPaused(job)) == events.count(JobResumed(job)) == 8
    events += bench.finish()
    assert len(ids_of(job, events)) == 40 and bench.is_clean


def test_time_in_which_nothing_is_computed_is_no_step(bench: Bench) -> None:
    warm(bench)
    job = bench.submit()
    bench.step()
    before = bench.engine.stats().busy_ms_total
    bench.engine.pause(job)
    bench.step()
    bench.clock.now += 50.0
    bench.engine.resume(job)
    bench.finish()
    bench.clock.now += 5.0
    bench.submit()
    bench.finish()
    stats = bench.engine.stats()
    assert stats.busy_ms_total - before < 1000 and stats.step_ms == pytest.approx(10)


# ── on a thread of its own ───────────────────────────────────────────────────────────────────


def submitted(bench: Bench, count: int) -> list[Job]:
    jobs = [Job([1, 2], Sampling(max_tokens=8), 1e9) for _ in range(count)]
    threads = [threading.Thread(target=bench.engine.submit, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return jobs


def test_jobs_of_many_threads_all_end_once(bench: Bench) -> None:
    sink = Collector()
    bench.engine.start(sink)
    jobs = submitted(bench, 8)
    sink.wait_ended(8)
    bench.engine.stop()
    bench.engine.stop()
    assert all(end_of(job, sink.events).reason is FinishReason.LENGTH for job in jobs)
    with pytest.raises(RuntimeError, match="starts once"):
        bench.engine.start(sink)


def test_an_engine_says_since_when_it_is_in_a_step_and_stop_ends_everything(bench: Bench) -> None:
    sink = Collector()
    entered, gate = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)

    bench.meanwhile(block)
    engine = bench.engine
    assert engine.step_under_way is None
    engine.start(sink)
    jobs = submitted(bench, 8)
    assert entered.wait(PATIENCE_S)
    step = engine.step_under_way
    assert step is not None and engine.step_under_way == step and step.usual_s == 0
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    gate.set()
    stopping.join(PATIENCE_S)
    after = Job([1], Sampling(max_tokens=1), 1e9)
    engine.submit(after)
    for job in jobs:  # some may have ended before the stop was heard
        assert end_of(job, sink.events).code in (None, Code.DRAINING)
    assert end_of(after, sink.events).code is Code.DRAINING
    assert engine.step_under_way is None and engine.stats().running == 0


def test_an_engine_that_fails_ends_all_jobs_and_takes_no_more(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """With codes that have orchestrators try elsewhere: those that ran with the one that counts,
    since one of them may be what it failed of."""
    sink = Collector()

    def fail(plan: Any, patience_s: Any) -> None:
        raise RuntimeError("the device is gone")

    bench.engine.backend.compute = fail  # type: ignore[method-assign]
    jobs = submitted(bench, 6)
    bench.engine.start(sink)
    sink.wait_ended(6)
    codes = sorted(end_of(job, sink.events).code or "" for job in jobs)
    assert codes == [Code.DRAINING] * 2 + [Code.INSTANCE_LOST] * 4
    late = Job([1], Sampling(max_tokens=1), 1e9)
    bench.engine.submit(late)
    sink.wait_ended(7)
    assert end_of(late, sink.events).code is Code.DRAINING
    assert "accepting no more" in caplog.text and bench.engine.has_failed
    bench.engine.stop()
