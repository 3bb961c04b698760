import pytest

from protocol import AbortCause, FinishReason
from tests.support.engine import Bench, end_of, ids_of
from worker.core import JobStarted, JobTokens


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


def test_an_abort_frees_blocks_before_the_next_step() -> None:
    """DL-4, WP-4, WP-5: gone before the runner is called again."""
    bench = Bench()
    job, other = bench.submit(max_tokens=50), bench.submit(max_tokens=50)
    bench.step(3)
    bench.engine.cancel(job, AbortCause.CANCEL)
    bench.clock.now += 0.004
    used_at_execute = []
    bench.runner.during = lambda plan: used_at_execute.append(bench.scheduler.pool.used_count)
    events = bench.step()
    end = end_of(job, events)
    assert end.abort_ms == pytest.approx(4)
    assert ids_of(other, events) == [7]
    assert used_at_execute == [-(-53 // 4)]


def test_certain_work_is_what_the_context_allows() -> None:
    """DL-3: of 1000 tokens asked for, the context has room for 20."""
    bench = Bench(blocks=100, context_tokens=240)
    bench.runner.step_s = 0.1
    bench.submit(max_tokens=200)
    bench.finish()  # it has decoded enough to know what is certain
    job = bench.submit(prompt=220, max_tokens=1000, ignore_eos=True, left_s=5.0)
    end = end_of(job, bench.finish())
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 20)


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


def test_cached_tokens_are_counted_and_reported() -> None:
    """WK-5: a prompt that was computed before is not computed again."""
    bench = Bench()
    first = bench.submit(prompt=13, max_tokens=2)
    bench.finish()
    again = bench.submit(prompt=13, max_tokens=2)
    events = bench.finish()
    assert end_of(again, events).cached_tokens == 12
    told = [e.cached_tokens for e in events if isinstance(e, JobTokens) and e.job is again]
    assert told[0] == 12 and not any(told[1:])
    assert first.session == ""
    stats = bench.engine.stats()
    assert (stats.prefill_tokens_total, stats.cached_tokens_total) == (14, 12)
    assert (stats.hit_blocks_total, stats.missed_blocks_total) == (3, 3)
    assert (stats.kv_blocks_used, stats.kv_blocks_cached) == (0, 3)
    assert stats.steps_total == 4
    assert stats.context_tokens_total == 2 * 13, "by the step that decodes in each"
    assert bench.is_clean
