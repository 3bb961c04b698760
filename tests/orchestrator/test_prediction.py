"""DL-7's prediction: learnt from what workers report, quantiles, cold start, change of pace."""

import math
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prediction import (
    LEARNT_JOBS,
    LengthLearner,
    Load,
    Quantiles,
    StepLearner,
    StepModel,
    Work,
)
from worker.protocol import WorkerStats


@dataclass
class Steps:
    """A worker that takes ``base + row · rows + prompt · prompt tokens`` a step, with noise."""

    base: float = 12.0
    row: float = 0.5
    prompt: float = 0.05
    noise: float = 0.05
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    steps: int = 0
    busy: float = 0.0
    tokens: int = 0
    prompts: int = 0

    def step_ms(self, rows: int, prompts: int) -> float:
        exact = self.base + self.row * rows + self.prompt * prompts
        return exact * math.exp(self.rng.gauss(0, self.noise))

    def run(self, steps: int, rows: int, prompts: int) -> WorkerStats:
        for _ in range(steps):
            self.busy += self.step_ms(rows, prompts)
        self.steps += steps
        self.tokens += rows * steps
        self.prompts += prompts * steps
        return WorkerStats(
            *(0, 0, 0, rows, 0, 0.0, 0.0, self.tokens, 0, 0, 0.0),
            steps_total=self.steps,
            busy_ms_total=self.busy,
            prefill_tokens_total=self.prompts,
        )


def learnt(worker: Steps, windows: int = 200, seed: int = 5) -> StepLearner:
    rng = random.Random(seed)
    learner = StepLearner(32, 512)
    for _ in range(windows):
        prompts = rng.choice([0, 0, 100, 400])
        learner.observe(worker.run(rng.randint(2, 10), rng.randint(1, 32), prompts))
    return learner


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    base=st.floats(0.5, 50), row=st.floats(0.05, 2), prompt=st.floats(0.02, 0.5), seed=st.integers()
)
def test_the_step_model_is_found(base: float, row: float, prompt: float, seed: int) -> None:
    """Steps within the seen range are predicted within 15 %, or 5 % of the largest of them."""
    worker = Steps(base, row, prompt, rng=random.Random(seed))
    model = learnt(worker, seed=seed).model
    for rows, prompts in ((1, 0), (16, 0), (32, 0), (16, 200), (8, 400)):
        exact = base + row * rows + prompt * prompts
        found = model.base_ms + model.row_ms * rows + model.prompt_token_ms * prompts
        largest = base + row * 32 + prompt * 400
        assert found == pytest.approx(exact, rel=0.15, abs=0.05 * largest)
    assert min(model.base_ms, model.row_ms, model.prompt_token_ms) > 0


@pytest.mark.parametrize("factor", [10.0, 3.0, 0.2])
def test_a_change_of_pace_shows_within_three_windows(factor: float) -> None:
    """Statistics come every 250 ms, so this is within a second."""
    worker = Steps()
    learner = learnt(worker)
    before = learner.model
    worker.base, worker.row, worker.prompt = (
        factor * c for c in (worker.base, worker.row, worker.prompt)
    )
    for _ in range(3):
        learner.observe(worker.run(5, 16, 50))
    assert learner.model.step_ms(16) / before.step_ms(16) == pytest.approx(factor, rel=0.35)
    assert learner.model.epoch > before.epoch


def test_one_pause_of_the_machine_is_no_change_of_pace() -> None:
    worker = Steps()
    learner = learnt(worker)
    before = learner.model.step_ms(16)
    worker.busy += 3000
    learner.observe(worker.run(5, 16, 0))
    learner.observe(worker.run(5, 16, 0))
    assert learner.model.step_ms(16) == pytest.approx(before, rel=0.1)


def test_a_constant_load_does_not_wind_up() -> None:
    """Hours of one and the same load, then another: the model is still physical and near."""
    worker = Steps()
    learner = learnt(worker)
    for _ in range(5000):
        learner.observe(worker.run(5, 8, 0))
    model = learner.model
    assert model.base_ms + model.row_ms * 8 == pytest.approx(16.0, rel=0.05)
    for _ in range(20):
        learner.observe(worker.run(5, 32, 0))
    assert learner.model.step_ms(32) == pytest.approx(28.0, rel=0.15)


def test_a_worker_that_restarts_or_says_little() -> None:
    learner = StepLearner(8, 512)
    learner.observe(Steps().run(0, 0, 0))
    learner.observe(WorkerStats(0, 0, 0, 4, 0, 40.0, 0.0, 0, 0, 0, 0.0))
    assert learner.model.base_ms + 4 * learner.model.row_ms == pytest.approx(40.0)
    worker = Steps(noise=0.0)
    learner = learnt(worker, 50)
    before = learner.model
    learner.observe(Steps(noise=0.0).run(3, 4, 0))
    assert learner.model.step_ms(4) == pytest.approx(before.step_ms(4), rel=0.2)


def test_dl7_nothing_is_certain_before_jobs_have_finished() -> None:
    learner = StepLearner(8, 512)
    work = Work(100, 0, 50)
    assert not learner.model.known
    assert learner.model.least_ms(work) == 0.0
    estimate = learner.model.estimate(work)
    assert 0 < estimate.prefill_ms < estimate.finish_ms <= estimate.upper_ms
    for _ in range(LEARNT_JOBS):
        learner.finished(learner.model, Load(), work, estimate.finish_ms)
    assert learner.model.known
    assert 0 < learner.model.least_ms(work) < estimate.finish_ms


def test_dl7_quantiles_hold_the_share_that_they_name() -> None:
    """Jobs that scatter by 20 %: about 1 in 200 is faster than low, 2 % slower than high."""
    worker, rng = Steps(), random.Random(9)
    learner = learnt(worker)
    faster = slower = 0
    count = 4000
    for _ in range(count):
        work = Work(rng.randint(1, 300), 0, rng.randint(1, 100))
        model = learner.model
        usual = model.finish_ms(work, Load()) / model.ratios[1]
        took = 1.3 * usual * math.exp(rng.gauss(0, 0.2))
        if model.known:
            faster += took < usual * model.ratios[0]
            slower += took > usual * model.ratios[2]
        learner.finished(model, Load(), work, took)
    assert faster / count < 0.01
    assert 0.01 < slower / count < 0.04
    assert learner.model.ratios[1] == pytest.approx(1.3, rel=0.05)


def test_jobs_under_way_at_a_jump_say_nothing() -> None:
    worker = Steps()
    learner = learnt(worker)
    old = learner.model
    worker.base *= 10
    worker.row *= 10
    for _ in range(3):
        learner.observe(worker.run(5, 16, 0))
    learner.finished(old, Load(), Work(10, 0, 10), 10_000)
    assert learner.model.ratios == old.ratios


loads = st.builds(
    Load, st.integers(0, 64), st.integers(0, 64), st.integers(0, 5000), st.integers(0, 9999)
)
works = st.builds(Work, st.integers(1, 4000), st.integers(0, 5000), st.integers(1, 2000))


@given(load=loads, work=works)
def test_an_estimate_is_physical(load: Load, work: Work) -> None:
    """Parts add up, more work takes longer, nothing beats the least."""
    model = StepModel(16, 512, 10.0, 0.5, 0.05, 20.0, (0.8, 1.0, 1.4))
    estimate = model.estimate(work, load)
    parts = estimate.wait_ms + estimate.prefill_ms + estimate.decode_ms
    assert parts == pytest.approx(estimate.finish_ms) == model.finish_ms(work, load)
    assert model.least_ms(work) <= estimate.finish_ms <= estimate.upper_ms
    longer = Work(work.prompt_tokens, work.cached_tokens, work.output_tokens + 1)
    assert model.estimate(longer, load).finish_ms > estimate.finish_ms
    assert model.slow_ms(work) >= model.service_ms(work)


@given(budget=st.floats(0, 1e5), work=works)
def test_dl6_what_fits_is_what_slow_ms_allows(budget: float, work: Work) -> None:
    model = StepModel(16, 512, 10.0, 0.5, 0.05, 20.0, (0.8, 1.0, 1.4))
    count = model.tokens_within(budget, work)

    def slow(tokens: int) -> float:
        return model.slow_ms(Work(work.prompt_tokens, work.cached_tokens, tokens))

    assert count == 0 or slow(count) <= budget * (1 + 1e-9)
    assert slow(count + 1) > budget * (1 - 1e-9)


@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=60))
def test_a_window_forgets_its_prior_first(values: list[float]) -> None:
    window = Quantiles([1000.0] * 4, size=8)
    for value in values:
        window.add(value)
    kept = ([1000.0] * 4 + values)[-8:]
    assert window.at(0.0) == min(kept)
    assert window.at(1.0) == max(kept)


def test_lengths_are_learnt_and_cut_ones_count_as_longer() -> None:
    rng = random.Random(1)
    lengths = LengthLearner()
    for _ in range(500):
        share = rng.betavariate(2, 5)
        if share > 0.4:  # a deadline cuts all long ones
            lengths.cut(40, 100)
        else:
            lengths.finished(round(100 * share), 100)
    assert lengths.tokens(1000, 0.5) == pytest.approx(265, rel=0.2)
    assert lengths.tokens(1000, 0.95) > 400
    assert lengths.tokens(1, 0.5) == 1


def test_what_is_no_number_teaches_nothing() -> None:
    """DL-7: a NaN compares with nothing, so that a forecast of NaN would refuse everybody."""
    worker = Steps(10.0, 0.5, 0.1)
    learner = learnt(worker)
    before = learner.model
    for wrong in (math.nan, math.inf):
        learner.observe(msgspec.structs.replace(worker.run(5, 4, 0), busy_ms_total=wrong))
        learner.observe(msgspec.structs.replace(worker.run(5, 4, 0), steps_total=0, step_ms=wrong))
        learner.finished(before, Load(), Work(10), wrong)
    assert learner.model == before
    learner.observe(worker.run(5, 4, 0))
    assert math.isfinite(learner.model.base_ms)
