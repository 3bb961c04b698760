import subprocess
import sys

import pytest

from tests.worker.engine.harness import EOS, Bench, FakeClock, end_of, ids_of
from worker.engine.core import JobTokens
from worker.engine.engine import Engine
from worker.engine.synthetic import FreeRunner, PacedRunner
from worker.protocol import AbortCause, FinishReason

CYCLE = [10, 11, 12]


def with_runner(bench: Bench, runner: FreeRunner | PacedRunner) -> Bench:
    bench.engine = Engine(bench.scheduler, runner, [EOS], clock=bench.clock)
    return bench


def test_free_repeats_its_cycle_several_tokens_a_step() -> None:
    bench = with_runner(Bench(), FreeRunner(CYCLE, tokens_per_step=4))
    job, other = bench.submit(max_tokens=9), bench.submit(max_tokens=2, logprobs=1)
    events = bench.finish()
    assert ids_of(job, events) == CYCLE * 3
    assert [len(e.ids) for e in events if isinstance(e, JobTokens) and e.job is job] == [4, 4, 1]
    (tokens,) = [e for e in events if isinstance(e, JobTokens) and e.job is other]
    assert tokens.logprobs is not None
    assert [logprob.top for logprob in tokens.logprobs] == [[(10, 0.0)], [(11, 0.0)]]
    assert end_of(job, events).reason is FinishReason.LENGTH
    assert bench.is_clean


def test_free_takes_prompts_in_chunks_and_can_be_cancelled() -> None:
    bench = with_runner(Bench(), FreeRunner(CYCLE))
    job = bench.submit(prompt=40, max_tokens=20)
    assert ids_of(job, bench.step(2)) == []
    assert len(ids_of(job, bench.step())) == 8
    bench.engine.cancel(job, AbortCause.CANCEL)
    assert end_of(job, bench.step()).completion_tokens == 8
    assert bench.is_clean


def test_paced_keeps_an_absolute_schedule() -> None:
    """A step that begins late for our own reasons does not move those after it."""
    clock = FakeClock(50.0)
    naps: list[float] = []

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        clock.now += duration_s + 0.0001  # no sleep is exact

    bench = Bench()
    bench.clock = clock
    with_runner(bench, PacedRunner(CYCLE, 0.02, clock=clock, sleep=sleep))
    job = bench.submit(max_tokens=5)
    ends = []
    events = []
    for _ in range(4):
        events += bench.step()
        ends.append(clock.now)
        clock.now += 0.003
    assert ends == pytest.approx([50.0201, 50.0401, 50.0601, 50.0801])
    clock.now += 10.0
    events += bench.step()
    assert clock.now == pytest.approx(60.1032)
    assert ids_of(job, events) == [10, 11, 12, 10, 11]


def test_a_synthetic_engine_needs_tokens() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        FreeRunner([])


def test_synthetic_engines_do_not_import_torch() -> None:
    code = "import sys, worker.engine.factory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
