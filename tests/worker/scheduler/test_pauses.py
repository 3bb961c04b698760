"""Paused jobs: out of the batch, their KV kept, with the same tokens in the end."""

from protocol import FinishReason, Sampling
from tests.support.engine import Bench, end_of, ids_of, was_started
from tests.support.fake_device import continuation
from tests.worker.engine.test_overlap import Bench as OverlapBench
from worker.core import Job, JobPaused, JobResumed


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
    assert JobResumed(job) not in events, "the slot is taken"
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
    assert JobPaused(job) in events and end_of(other, events).reason is FinishReason.LENGTH
    bench.engine.resume(job)
    events += bench.finish()
    assert ids_of(job, events) == continuation([9] * 3, 9, ignore_eos=True)
