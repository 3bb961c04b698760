"""Paused jobs: out of the batch, their KV kept, with the same tokens in the end."""

import threading
import time

from protocol import AbortCause, Code, FinishReason, Sampling
from tests.support.engine import EOS, Bench, end_of, ids_of, was_started
from tests.support.fake_device import continuation
from tests.worker.engine.test_engine_thread import PATIENCE_S, Collector
from tests.worker.engine.test_overlap import Bench as OverlapBench
from worker.core import Event, Job, JobPaused, JobResumed
from worker.engine.engine import Engine, EngineConfig
from worker.engine.loop import PAUSED_S
from worker.runner.synthetic import FreeRunner


def paused(job: Job, events: list[Event]) -> bool:
    return any(isinstance(e, JobPaused) and e.job is job for e in events)


def resumed(job: Job, events: list[Event]) -> bool:
    return any(isinstance(e, JobResumed) and e.job is job for e in events)


def computed_in(bench: Bench, job: Job) -> list[tuple[int, int]]:
    """First position and count of each row that the job had."""
    rows = (row for plan in bench.runner.plans for row in plan.rows)
    return [(row.start, row.count) for row in rows if row.request.job is job]


def test_a_paused_job_leaves_its_slot_and_computes_nothing_twice() -> None:
    bench = Bench(max_running=1)
    job = bench.submit(prompt=3, max_tokens=8)
    bench.step(3)
    used = bench.scheduler.pool.used_count
    bench.engine.pause(job)
    other = bench.submit(prompt=3, max_tokens=2, left_s=200)
    events = bench.step()
    assert paused(job, events) and was_started(other, events)
    stats = bench.engine.stats()
    assert (stats.running, stats.paused) == (1, 1)
    assert stats.kv_blocks_used == used + 2
    bench.step(2)
    bench.engine.resume(job)
    events = bench.finish()
    assert resumed(job, events)
    assert end_of(job, events).completion_tokens == 8
    assert computed_in(bench, job) == [(0, 3)] + [(n, 1) for n in range(3, 10)]
    assert bench.is_clean


def test_who_resumes_comes_before_who_waits() -> None:
    """Even before one with less slack, and when it has to wait for a slot itself."""
    bench = Bench(max_running=1)
    job = bench.submit(max_tokens=8, left_s=1000)
    bench.step(2)
    bench.engine.pause(job)
    other = bench.submit(max_tokens=4, left_s=50)
    bench.step()
    urgent = bench.submit(max_tokens=4, left_s=10)
    bench.engine.resume(job)
    events = bench.step()
    assert not resumed(job, events), "the slot is taken"
    order = [e.job for e in bench.finish() if isinstance(e, JobResumed) or was_started(e.job, [e])]
    assert order == [job, urgent]
    assert other is not urgent and bench.is_clean


def test_who_needs_a_prefix_does_not_wait_for_one_that_is_paused() -> None:
    """WK-5: what nobody is computing has to be computed."""
    bench = Bench(max_step_tokens=8)
    head = list(range(10, 30))
    sampling = Sampling(max_tokens=2)
    first, second = (Job([*head, n], sampling, 100.0 + n) for n in (1, 2))
    bench.engine.submit(first)
    bench.step()
    bench.engine.submit(second)
    bench.engine.pause(first)
    events = bench.step(5)
    assert end_of(second, events).reason is FinishReason.LENGTH
    bench.engine.resume(first)
    assert end_of(first, bench.finish()).reason is FinishReason.LENGTH
    assert bench.is_clean


def test_a_paused_job_s_blocks_do_not_idle_the_rest() -> None:
    """A small one goes before a large one that lacks the blocks of a paused one."""
    bench = Bench(blocks=16, max_step_tokens=64, prefix_cache=False)
    job = bench.submit(prompt=30, max_tokens=14)
    bench.step()
    bench.engine.pause(job)
    large = bench.submit(prompt=30, max_tokens=14, left_s=50)
    small = bench.submit(prompt=3, max_tokens=3, left_s=200)
    events = bench.step(4)
    assert end_of(small, events).reason is FinishReason.LENGTH
    assert not was_started(large, events)
    bench.engine.resume(job)
    assert end_of(large, bench.finish()).reason is FinishReason.LENGTH


def test_with_overlap_the_step_under_way_is_read_first() -> None:
    bench = OverlapBench(limits={"max_running": 1})
    job = bench.submit([9] * 3, max_tokens=9)
    events = bench.step(3)
    bench.engine.pause(job)
    other = bench.submit([9] * 5, max_tokens=3)
    launches = bench.device.launches
    events += bench.step()
    assert bench.device.launches == launches and not bench.device.uncollected
    assert len(ids_of(job, events)) == 3
    events += bench.step(5)
    assert paused(job, events) and end_of(other, events).reason is FinishReason.LENGTH
    bench.engine.resume(job)
    events += bench.finish()
    assert ids_of(job, events) == continuation([9] * 3, 9, ignore_eos=True)


def test_an_engine_with_nothing_but_paused_jobs_sleeps() -> None:
    """And wakes for a resume, an abort and a deadline. Nothing here depends on how fast it is."""
    bench = Bench(blocks=1000, context_tokens=100_000, block_tokens=16)
    engine = Engine(bench.scheduler, FreeRunner([7, 8, 9]), EngineConfig([EOS]))
    sink = Collector()
    engine.start(sink)

    def job(left_s: float) -> Job:
        one = Job([1, 2], Sampling(max_tokens=90_000), time.monotonic() + left_s)
        engine.submit(one)
        engine.pause(one)
        return one

    def wait(condition: object) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition() and time.monotonic() < give_up_at:  # type: ignore[operator]
            time.sleep(0.005)
        assert condition()  # type: ignore[operator]

    try:
        late, cancelled, going = job(0.5), job(1000), job(1000)
        wait(lambda: all(paused(one, sink.events) for one in (cancelled, going)))
        sink.wait_ended(1)
        assert end_of(late, sink.events).code is Code.DEADLINE_EXCEEDED
        steps = engine._expiry._checks
        began = time.monotonic()
        threading.Event().wait(0.5)
        woken = 2 + (time.monotonic() - began) / PAUSED_S
        assert engine._expiry._checks - steps <= 2 * woken, "it spins"
        engine.cancel(cancelled, AbortCause.CANCEL)
        sink.wait_ended(2)
        engine.resume(going)
        wait(lambda: ids_of(going, sink.events))
    finally:
        engine.stop()
    assert bench.is_clean
