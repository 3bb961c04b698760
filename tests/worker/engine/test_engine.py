import math

import pytest

from protocol import AbortCause, Code, FinishReason, OnDeadline, Sampling, TokenLogprob
from tests.support.engine import EOS, Bench, end_of, ids_of, was_started
from worker.core import Event, Job, JobFinished, JobStarted, JobTokens
from worker.scheduler.plan import Plan, StepResult

ABORTS = [
    (AbortCause.CANCEL, Code.CANCELLED),
    (AbortCause.DISCONNECT, Code.CLIENT_DISCONNECTED),
    (AbortCause.LANE_LOST, Code.CLIENT_DISCONNECTED),
    (AbortCause.DRAIN, Code.DRAINING),
]


def test_a_job_runs_to_its_length() -> None:
    bench = Bench()
    bench.runner.step_s = 0.01
    job = bench.submit(prompt=3, max_tokens=5)
    events = bench.finish()
    end = end_of(job, events)
    assert was_started(job, events)
    assert ids_of(job, events) == [7] * 5
    assert (end.reason, end.code, end.message) == (FinishReason.LENGTH, None, "")
    assert (end.prompt_tokens, end.completion_tokens, end.late_tokens) == (3, 5, 0)
    assert end.wait_ms == 0
    assert end.prefill_ms == pytest.approx(10)
    assert end.decode_ms == pytest.approx(40)
    assert end.left_ms == pytest.approx(99_950)
    assert end.abort_ms is None
    assert bench.is_clean


def test_dl9_a_job_of_a_step_that_had_begun_waited_for_nothing() -> None:
    """DL-9: a step's time is taken at its beginning, before the last jobs come that it starts."""
    bench = Bench()
    bench.runner.step_s = 0.01
    bench.clock.now += 0.007
    job = bench.submit(max_tokens=2)
    bench.clock.now -= 0.007
    events = bench.step()
    assert next(e.wait_ms for e in events if isinstance(e, JobStarted) and e.job is job) == 0
    end = end_of(job, events + bench.finish())
    assert end.wait_ms == 0
    assert end.prefill_ms == pytest.approx(3)


@pytest.mark.parametrize(
    ("max_tokens", "ignore_eos", "ids", "reason"),
    [
        (5, False, [7, EOS], FinishReason.STOP),
        (2, False, [7, EOS], FinishReason.STOP),
        (5, True, [7, EOS, 8, 7, EOS], FinishReason.LENGTH),
    ],
)
def test_end_of_sequence(
    max_tokens: int, ignore_eos: bool, ids: list[int], reason: FinishReason
) -> None:
    bench = Bench()
    bench.runner.answer = lambda plan: StepResult([[7, EOS, 8][: _room(plan)]])
    job = bench.submit(max_tokens=max_tokens, ignore_eos=ignore_eos, logprobs=None)
    events = bench.finish()
    assert ids_of(job, events) == ids
    assert end_of(job, events).reason is reason
    assert end_of(job, events).completion_tokens == len(ids)
    assert bench.is_clean


def test_logprobs_are_cut_with_their_tokens() -> None:
    bench = Bench()
    logprobs = [TokenLogprob(-1.0), TokenLogprob(-2.0), TokenLogprob(-3.0)]
    bench.runner.answer = lambda plan: StepResult([[7, EOS, 8]], [logprobs])
    job = bench.submit(logprobs=0)
    (tokens,) = [e for e in bench.finish() if isinstance(e, JobTokens)]
    assert tokens.job is job
    assert tokens.logprobs == logprobs[:2]


@pytest.mark.parametrize(("cause", "code"), ABORTS)
def test_abort_of_a_running_job_frees_it_before_the_next_step(
    cause: AbortCause, code: Code
) -> None:
    """DL-4, WP-4, WP-5: gone before the runner is called again."""
    bench = Bench()
    job, other = bench.submit(max_tokens=50), bench.submit(max_tokens=50)
    before = bench.step(3)
    bench.engine.cancel(job, cause)
    bench.clock.now += 0.004
    used_at_execute = []
    bench.runner.during = lambda plan: used_at_execute.append(bench.scheduler.pool.used_count)
    events = bench.step()
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.CANCELLED, code)
    assert end.completion_tokens == len(ids_of(job, before)) == 3
    assert end.late_tokens == 0
    assert end.abort_ms == pytest.approx(4)
    assert ids_of(job, events) == []
    assert ids_of(other, events) == [7]
    assert used_at_execute == [-(-53 // 4)]


@pytest.mark.parametrize(("cause", "code"), ABORTS)
def test_abort_of_a_waiting_job(cause: AbortCause, code: Code) -> None:
    bench = Bench(max_running=1)
    bench.submit(max_tokens=50)
    job = bench.submit(left_s=200)
    bench.step()
    bench.engine.cancel(job, cause)
    events = bench.step()
    assert end_of(job, events).code is code
    assert not was_started(job, events)


def test_abort_before_the_engine_saw_the_job() -> None:
    bench = Bench()
    job = bench.submit()
    bench.engine.cancel(job, AbortCause.CANCEL)
    events = bench.step()
    assert end_of(job, events).code is Code.CANCELLED
    assert bench.runner.plans == []


def test_the_first_cause_of_an_abort_wins() -> None:
    bench = Bench()
    job = bench.submit()
    bench.engine.cancel(job, AbortCause.DISCONNECT)
    bench.engine.cancel(job, AbortCause.CANCEL)
    assert end_of(job, bench.step()).code is Code.CLIENT_DISCONNECTED
    bench.engine.cancel(job, AbortCause.CANCEL)
    assert bench.step() == []


def test_a_token_computed_during_an_abort_is_late_and_not_published() -> None:
    """DL-10: counted apart."""
    bench = Bench()
    job = bench.submit(max_tokens=50)
    bench.step(2)
    bench.runner.during = lambda plan: bench.engine.cancel(job, AbortCause.CANCEL)
    events = bench.step()
    end = end_of(job, events)
    assert ids_of(job, events) == []
    assert (end.completion_tokens, end.late_tokens) == (2, 1)
    stats = bench.engine.stats()
    assert (stats.tokens_total, stats.late_tokens_total) == (2, 1)
    assert bench.is_clean


def test_who_hears_of_an_early_end_finds_it_in_the_statistics() -> None:
    """Else the orchestrator takes the job for somebody else's, and its slot for taken."""
    bench = Bench()
    job = bench.submit(max_tokens=50)
    bench.submit(max_tokens=50)
    bench.step(2)
    heard: list[tuple[int, int]] = []

    def hear(events: list[Event]) -> None:
        ends = sum(isinstance(event, JobFinished) for event in events)
        heard.append((ends, bench.engine.stats().running))

    bench.engine.connect(hear)
    assert bench.engine.stats().running == 2
    bench.engine.cancel(job, AbortCause.CANCEL)
    bench.step()
    assert heard == [(1, 1)]


def test_a_stop_string_ends_well_and_wastes_nothing_late() -> None:
    bench = Bench()
    job = bench.submit(max_tokens=50)
    bench.step(2)
    bench.runner.during = lambda plan: bench.engine.cancel(job, AbortCause.STOP_STRING)
    end = end_of(job, bench.step())
    assert (end.reason, end.code, end.late_tokens) == (FinishReason.STOP, None, 0)
    assert end.abort_ms is None
    assert bench.is_clean


def test_the_deadline_ends_a_running_job() -> None:
    """DL-3, DL-4: stopped before the next step."""
    bench = Bench()
    job = bench.submit(max_tokens=50, left_s=1.0)
    bench.step(3)
    bench.clock.now = 1.25
    calls = len(bench.runner.plans)
    events = bench.step()
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
    assert (end.completion_tokens, end.late_tokens) == (3, 0)
    assert end.left_ms == pytest.approx(-250)
    assert end.abort_ms == pytest.approx(250)
    assert len(bench.runner.plans) == calls
    assert bench.is_clean


def test_a_token_computed_past_the_deadline_is_late() -> None:
    bench = Bench()
    bench.runner.step_s = 0.3
    job = bench.submit(max_tokens=50, left_s=1.0)
    events = bench.finish()
    end = end_of(job, events)
    assert end.code is Code.DEADLINE_EXCEEDED
    assert (len(ids_of(job, events)), end.late_tokens) == (3, 1)


def test_partial_ends_cleanly_before_the_deadline() -> None:
    """DL-6: the step that would pass the deadline is not begun."""
    bench = Bench()
    bench.runner.step_s = 0.3
    job = bench.submit(max_tokens=50, left_s=1.0, on_deadline=OnDeadline.PARTIAL)
    end = end_of(job, bench.finish())
    assert (end.reason, end.code) == (FinishReason.DEADLINE, None)
    assert (end.completion_tokens, end.late_tokens) == (3, 0)
    assert end.left_ms == pytest.approx(100)
    assert bench.is_clean


def test_partial_stays_clean_when_a_step_is_slower_than_ever() -> None:
    bench = Bench()
    bench.runner.step_s = 0.1
    job = bench.submit(max_tokens=50, left_s=1.0, on_deadline=OnDeadline.PARTIAL)
    bench.step(4)
    bench.runner.step_s = 5.0
    end = end_of(job, bench.finish())
    assert (end.reason, end.code) == (FinishReason.DEADLINE, None)
    assert (end.completion_tokens, end.late_tokens) == (4, 1)


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({"min_tokens": 50}, 1),
        ({"ignore_eos": True}, 1),
        ({"ignore_eos": True, "stop": ("x",)}, 9),
        ({}, 9),
    ],
    ids=["min_tokens", "ignore_eos", "may_stop", "may_end"],
)
def test_a_job_that_cannot_finish_is_stopped_at_once(
    sampling: dict[str, object], tokens: int
) -> None:
    """DL-3 in the loop: 50 certain tokens at 100 ms each do not fit into a second."""
    bench = known_pace(0.1)
    job = bench.submit(max_tokens=50, left_s=0.99, **sampling)
    events = bench.finish()
    assert end_of(job, events).code is Code.DEADLINE_EXCEEDED
    assert len(ids_of(job, events)) == tokens


def known_pace(step_s: float, **changes: float) -> Bench:
    """A bench that has decoded enough to know what is certain."""
    bench = Bench(blocks=100, **({"context_tokens": 400} | changes))
    bench.runner.step_s = step_s
    bench.submit(max_tokens=200)
    bench.finish()
    return bench


def test_work_that_just_fits_is_not_stopped() -> None:
    """DL-3: the certain work shrinks with every token."""
    bench = known_pace(0.1)
    job = bench.submit(max_tokens=20, left_s=2.05, ignore_eos=True)
    assert end_of(job, bench.finish()).reason is FinishReason.LENGTH


def test_certain_work_is_what_the_context_allows() -> None:
    """DL-3: of 1000 tokens asked for, the context has room for 20."""
    bench = known_pace(0.1, context_tokens=240)
    job = bench.submit(prompt=220, max_tokens=1000, ignore_eos=True, left_s=5.0)
    end = end_of(job, bench.finish())
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 20)


def test_a_waiting_job_expires_while_others_run() -> None:
    """DL-3: with 100 ms left it could no longer start."""
    bench = Bench(max_running=1, min_start_budget_s=0.25)
    bench.runner.step_s = 0.1
    bench.submit(max_tokens=50)
    bench.step()
    job = bench.submit(left_s=0.95)
    events = bench.step(9)
    end = end_of(job, events)
    assert (end.reason, end.code) == (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
    assert end.left_ms == pytest.approx(150)
    assert end.wait_ms == pytest.approx(800)
    assert not was_started(job, events)


def test_a_full_worker_refuses() -> None:
    bench = Bench(max_running=2, max_waiting=1)
    jobs = [bench.submit(max_tokens=20, left_s=100 + i) for i in range(4)]
    events = bench.step()
    end = end_of(jobs[3], events)
    assert (end.reason, end.code) == (FinishReason.ERROR, Code.NO_CAPACITY)
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.jobs_total) == (2, 1, 4)
    bench.engine.cancel(jobs[0], AbortCause.CANCEL)
    late = bench.submit(left_s=300)
    assert not any(e.job is late for e in bench.step())


def test_a_failing_runner_ends_its_jobs_and_leaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(max_step_tokens=6)

    def fail(plan: Plan) -> None:
        raise ZeroDivisionError("secret")

    bench.runner.during = fail
    first, second, unplanned = bench.submit(), bench.submit(), bench.submit(left_s=200)
    events = bench.step(3)
    for job in (first, second):
        end = end_of(job, events)
        assert (end.reason, end.code) == (FinishReason.ERROR, Code.ENGINE_ERROR)
        assert "ZeroDivisionError" in end.message
        assert "secret" not in end.message
    assert not any(isinstance(e, JobTokens | JobFinished) for e in events if e.job is unplanned)
    assert "step of 2 rows failed" in caplog.text
    assert caplog.text.count("Traceback") == 1
    bench.runner.during = lambda plan: None
    assert end_of(unplanned, bench.finish()).reason is FinishReason.LENGTH
    assert bench.is_clean


def test_a_result_of_the_wrong_shape_is_a_failure() -> None:
    bench = Bench()
    bench.runner.answer = lambda plan: StepResult([])
    job = bench.submit()
    assert end_of(job, bench.step()).code is Code.ENGINE_ERROR
    assert bench.is_clean


def test_stop_ends_everything() -> None:
    bench = Bench(max_running=1)
    jobs = [bench.submit(max_tokens=20) for _ in range(2)]
    bench.step()
    seen: list[object] = []
    bench.engine._sink = seen.extend
    jobs.append(bench.submit())
    bench.engine.stop()
    jobs.append(bench.submit())
    assert [e.code for e in seen] == [Code.DRAINING] * 4  # type: ignore[attr-defined]
    assert {e.job for e in seen} == set(jobs)  # type: ignore[attr-defined]
    assert bench.runner.closed
    assert bench.is_clean
    bench.engine.stop()


def test_the_client_s_seed_is_used_and_others_get_their_own() -> None:
    bench = Bench()
    bench.submit(seed=-1)
    bench.submit()
    bench.step()
    assert sorted(r.seed for r in bench.scheduler.running) == [5, 2**64 - 1]


def test_the_cost_of_the_look_is_sampled() -> None:
    """DL-13."""
    bench = Bench()
    bench.submit()
    bench.submit()
    bench.step(2)
    ticks = iter(range(1000))
    bench.engine._expiry._clock = lambda: next(ticks) * 3e-6
    bench.engine._expiry._checks = 32
    bench.step()
    assert bench.engine.stats().check_us == pytest.approx(1.5)


def test_steps_are_measured() -> None:
    bench = Bench()
    bench.runner.step_s = 0.02
    bench.submit(prompt=10)
    bench.step(3)
    stats = bench.engine.stats()
    assert stats.step_ms == pytest.approx(20)
    assert stats.prefill_tokens_per_s == pytest.approx(500)
    assert stats.kv_blocks_used + stats.kv_blocks_free == stats.kv_blocks_total == 64
    assert stats.kv_blocks_used == 5


def test_jobs_without_a_deadline() -> None:
    bench = Bench()
    job = Job([1], Sampling(max_tokens=2, ignore_eos=True), math.inf)
    bench.engine.submit(job)
    assert end_of(job, bench.finish()).left_ms == math.inf


def _room(plan: Plan) -> int:
    request = plan.rows[0].request
    return request.limit_tokens - len(request.tokens)


def test_cached_tokens_are_counted_and_reported() -> None:
    """WK-5: a prompt that was computed before is not computed again."""
    bench = Bench()
    first = bench.submit(prompt=13, max_tokens=2)
    bench.finish()
    again = bench.submit(prompt=13, max_tokens=2)
    assert end_of(again, bench.finish()).cached_tokens == 12
    assert first.session == ""
    stats = bench.engine.stats()
    assert (stats.prefill_tokens_total, stats.cached_tokens_total) == (14, 12)
    assert (stats.hit_blocks_total, stats.missed_blocks_total) == (3, 3)
    assert (stats.kv_blocks_used, stats.kv_blocks_cached) == (0, 3)
    assert stats.steps_total == 4
    assert bench.is_clean


def test_an_aborted_prompt_leaves_what_it_has_computed() -> None:
    bench = Bench()
    job = bench.submit(prompt=60, max_tokens=4)
    bench.step(2)
    bench.engine.cancel(job, AbortCause.CANCEL)
    bench.step()
    assert bench.engine.stats().kv_blocks_used == 0
    again = bench.submit(prompt=60, max_tokens=2)
    assert end_of(again, bench.finish()).cached_tokens == 32


def test_a_waiting_job_that_cannot_finish_any_more_is_ended() -> None:
    """DL-3: 50 certain tokens at 100 ms each need 5 s, and are not waited for with 3 left."""
    bench = known_pace(0.1, max_running=1)
    bench.submit(max_tokens=50, left_s=1.0)
    bench.step()
    unfinishable = bench.submit(max_tokens=50, min_tokens=50, left_s=3.0)
    patient = bench.submit(max_tokens=50, left_s=3.0)
    events = bench.step(2)
    end = end_of(unfinishable, events)
    assert (end.reason, end.code) == (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
    assert end.left_ms > 2500
    assert not any(e.job is patient for e in events)
