import subprocess
import sys
from pathlib import Path

import pytest

from protocol import FinishReason
from tests.support.cases import for_each
from tests.support.engine import EOS, Bench, FakeClock, end_of, ids_of
from worker.core import JobTokens
from worker.engine.engine import Engine, EngineConfig
from worker.runner.simulated_device import SimulatedDevice
from worker.runner.synthetic import FreeRunner, PacedRunner, StepCost, length_ids

CYCLE = [10, 11, 12]


def with_runner(bench: Bench, runner: FreeRunner | PacedRunner, *, overlap: bool = False) -> Bench:
    config = EngineConfig([EOS], overlap=overlap)
    bench.engine = Engine(bench.scheduler, runner, config, clock=bench.clock)
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


def test_paced_keeps_an_absolute_schedule() -> None:
    """A step that begins late for our own reasons does not move those after it."""
    clock = FakeClock(50.0)
    naps: list[float] = []

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        clock.now += duration_s + 0.0001  # no sleep is exact

    bench = Bench()
    bench.clock = clock
    runner = PacedRunner(CYCLE, StepCost(0.02), clock=clock, sleep=sleep)
    with_runner(bench, runner, overlap=True)
    job = bench.submit(max_tokens=5)
    ends = []
    events = []
    for _ in range(5):
        events += bench.step()
        ends.append(clock.now)
        clock.now += 0.003
    assert ends == pytest.approx([50.0, 50.0201, 50.0401, 50.0601, 50.0801])
    events += bench.finish()
    clock.now += 10.0
    begun = clock.now
    bench.submit(max_tokens=1)
    events += bench.finish()
    assert clock.now == pytest.approx(begun + 0.0201), "idle time is not caught up on"
    assert ids_of(job, events) == [10, 11, 12, 10, 11]


def test_a_step_takes_longer_with_rows_and_prompts(tmp_path: Path) -> None:
    """The batch behaviour of a real engine: a part that is shared, one per row, one per token."""
    clock = FakeClock(10.0)

    def sleep(duration_s: float) -> None:
        clock.now += duration_s

    slow = tmp_path / "slow"
    step_time = StepCost(0.02, row_s=0.001, prompt_token_s=0.0001)
    bench = Bench(prefix_cache=False)
    bench.clock = clock
    device = SimulatedDevice(slow, clock)
    with_runner(bench, PacedRunner(CYCLE, step_time, device=device, clock=clock, sleep=sleep))

    def step_ms() -> float:
        before = clock.now
        bench.step()
        return 1000 * (clock.now - before)

    bench.submit(prompt=10, max_tokens=50)
    assert step_ms() == pytest.approx(20 + 1 + 10 * 0.1)
    assert step_ms() == pytest.approx(20 + 1)
    bench.submit(prompt=5, max_tokens=50)
    assert step_ms() == pytest.approx(20 + 2 + 5 * 0.1)
    slow.write_text("10")
    clock.now += 0.3
    assert step_ms() == pytest.approx(220)
    slow.unlink()
    assert step_ms() == pytest.approx(22)


@for_each("tokens_per_step", [1, 4])
def test_answers_end_by_themselves_where_their_prompts_say(tokens_per_step: int) -> None:
    """A length that only the engine sees: the end token is the last one that counts."""
    bench = with_runner(Bench(), FreeRunner(CYCLE, tokens_per_step, end_id=EOS))
    for length in (1, 2, 5, 12):
        prompt = [7, 7, *length_ids(length)]
        job = bench.submit(prompt, max_tokens=50)
        events = bench.finish()
        assert ids_of(job, events) == [*(CYCLE * 4)[: length - 1], EOS]
        ended = end_of(job, events)
        assert (ended.reason, ended.completion_tokens) == (FinishReason.STOP, length)
    job = bench.submit([7, *length_ids(12)], max_tokens=5)
    assert end_of(job, bench.finish()).reason is FinishReason.LENGTH
    job = bench.submit([7, *length_ids(3)], max_tokens=5, ignore_eos=True)
    assert end_of(job, bench.finish()).completion_tokens == 5
    job = bench.submit([7, *length_ids(3)], max_tokens=50, min_tokens=9)
    assert end_of(job, bench.finish()).completion_tokens == 9
    assert bench.is_clean


def test_a_length_fits_in_two_ids() -> None:
    assert (length_ids(1), length_ids(513)) == ((0, 1), (2, 1))
    for wrong in (0, 65_536):
        with pytest.raises(ValueError, match="tokens"):
            length_ids(wrong)


def test_synthetic_engines_do_not_import_torch() -> None:
    code = "import sys, worker.engine.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
