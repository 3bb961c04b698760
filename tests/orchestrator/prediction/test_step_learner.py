"""DL-7's prediction: learnt from what workers report, quantiles, cold start, change of pace."""

import math
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prediction.step_learner import StepLearner
from orchestrator.prediction.step_model import IDLE, Load, Work
from protocol import CERTAIN_AFTER_STEPS, CERTAIN_SHARE, StepCosts, WorkerStats
from tests.support.cases import for_each
from tests.support.paces import pace_of


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
            *(0, 0, 0, rows, 0, 0.0, self.tokens, 0, 0, 0.0),
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


@for_each("costs", [None, StepCosts((1, 64), (0.5, 1.6), 0.04)])
def test_what_contexts_cost_is_learnt(costs: StepCosts | None) -> None:
    """As of the demo model on a CPU, where 64 rows took 1.6 ms with short contexts, 8 with long."""
    rng, learner, context = random.Random(3), StepLearner(64, 512, costs), 0.0
    steps, busy, tokens, contexts = 0, 0.0, 0, 0.0
    for window in range(400):
        rows = rng.choice([4, 16, 40, 64])
        context = 20 + (window * 16) % 400
        steps += 20
        busy += 20 * (0.48 + 0.0175 * rows + 0.00026 * rows * context) * rng.uniform(0.9, 1.1)
        tokens += 20 * rows
        contexts += 20 * rows * context
        learner.observe(
            WorkerStats(
                *(0, 0, 0, rows, 0, 0.0, 0.0, tokens, 0, 0, 0.0),
                steps_total=steps,
                busy_ms_total=busy,
                context_tokens_total=int(contexts),
            )
        )
    model = learner.model
    assert model.context_token_ms == pytest.approx(0.00026, rel=0.25)
    usual = 0.48 + 0.0175 * 32 + 0.00026 * 32 * model.context_per_row
    assert model.plain_step_ms(32) == pytest.approx(usual, rel=0.15)


@for_each("memory", [0.3, 0.9])
def test_what_a_row_takes_is_found_in_steps_that_scatter(memory: float) -> None:
    """As on two cores that everything shares. With a curve that says that rows are free, or that
    only they cost, as many or as few run as can: either loses what another number would keep."""
    worker, rng, scatter = Steps(noise=0.0), random.Random(7), 0.0
    learner, rows, wanted = StepLearner(64, 512), 5.0, 5
    learner.observe(worker.run(4, 5, 0))
    found = []
    for window in range(3000):
        if window % 150 == 0:
            wanted = rng.choice([3, 10, 16, 20, 30, 40, 60, 64])
        rows = min(64.0, max(1.0, rows + 0.08 * (wanted - rows) + rng.gauss(0, 1.5)))
        scatter = memory * scatter + math.sqrt(1 - memory**2) * rng.gauss(0, 0.25)
        stall = rng.uniform(1.5, 3.5) if rng.random() < 0.04 else 1.0
        before = worker.busy
        stats = worker.run(5, round(rows), max(0, round(rng.gauss(6, 6))))
        worker.busy = before + (stats.busy_ms_total - before) * math.exp(scatter) * stall
        learner.observe(msgspec.structs.replace(stats, busy_ms_total=worker.busy))
        if window > 500:
            model = learner.model
            found.append((model.base_ms + 16 * model.row_ms) / (model.base_ms + 64 * model.row_ms))
    found.sort()
    exact = (12 + 16 * 0.5) / (12 + 64 * 0.5)
    assert found[len(found) // 20] > 0.8 * exact
    assert found[-len(found) // 20] < 1.25 * exact


def test_what_a_row_takes_is_known_at_once_where_steps_were_measured_at_load() -> None:
    """Steps alone would show it in minutes, and as many rows too many would run until then."""
    worker, rng = Steps(noise=0.01), random.Random(7)
    learner = StepLearner(64, 512, StepCosts((1, 64), (12.5, 44.0), 0.05))
    for rows in (1, 5, 15, 34, 56, 57, 40, *(rng.randint(18, 25) for _ in range(60))):
        learner.observe(worker.run(4, rows, rng.randint(0, 40)))
        base, row = learner.model.base_ms, learner.model.row_ms
        assert (base, row) == (pytest.approx(12, rel=0.1), pytest.approx(0.5, rel=0.1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    factor=st.sampled_from([10.0, 0.1]),
    windows=st.integers(3, 200),
    rows=st.integers(1, 32),
    seed=st.integers(0, 2**32),
)
def test_dl19_ten_times_quicker_is_learnt_as_soon_as_ten_times_slower(
    factor: float, windows: int, rows: int, seed: int
) -> None:
    """Whatever was learnt before, and for how long: after three windows of statistics, which come
    four times a second, the prediction is within 1.5 times the truth."""
    worker = Steps(rng=random.Random(seed))
    learner = learnt(worker, windows, seed)
    worker.base, worker.row, worker.prompt = (
        factor * c for c in (worker.base, worker.row, worker.prompt)
    )
    for _ in range(3):
        learner.observe(worker.run(8, rows, 0))
    model = learner.model
    exact = worker.base + worker.row * rows
    assert 1 / 1.5 < (model.base_ms + model.row_ms * rows) / exact < 1.5


def test_the_rate_is_what_was_made_and_not_what_more_rows_might() -> None:
    worker = Steps(base=4.0, row=0.01, noise=0.0)
    learner = StepLearner(64, 512)
    learner.observe(worker.run(100, 1, 0))
    assert learner.model.tokens_per_s == 0.0  # before anybody listened
    for _ in range(10):
        learner.observe(worker.run(30, 1, 0))
    assert learner.model.tokens_per_s == pytest.approx(1000 / 4.01)
    assert learner.model.under(IDLE).tokens_per_s == learner.model.tokens_per_s
    for _ in range(10):
        learner.observe(worker.run(30, 32, 0))
    assert learner.model.tokens_per_s == pytest.approx(32_000 / 4.32)
    learner.observe(worker.run(30, 1, 0))
    assert learner.model.tokens_per_s == pytest.approx(32_000 / 4.32)
    assert learner.model.steps == 630


def test_one_pause_of_the_machine_is_no_change_of_pace() -> None:
    worker = Steps()
    learner = learnt(worker)
    before = learner.model.step_ms(16)
    worker.busy += 3000
    learner.observe(worker.run(5, 16, 0))
    learner.observe(worker.run(5, 16, 0))
    assert learner.model.step_ms(16) == pytest.approx(before, rel=0.1)


def test_a_worker_that_restarts_or_says_little() -> None:
    learner = StepLearner(8, 512)
    learner.observe(Steps().run(0, 0, 0))
    learner.observe(WorkerStats(0, 0, 0, 4, 0, 40.0, 0, 0, 0, 0.0))
    assert learner.model.base_ms + 4 * learner.model.row_ms == pytest.approx(40.0)
    worker = Steps(noise=0.0)
    learner = learnt(worker, 50)
    before = learner.model
    learner.observe(Steps(noise=0.0).run(3, 4, 0))
    assert learner.model.step_ms(4) == pytest.approx(before.step_ms(4), rel=0.2)


def test_or7_a_slow_past_is_a_guess_that_the_first_steps_replace() -> None:
    """What a worker did before anybody listened does not keep work from it."""
    past = Steps(base=400.0, row=20.0, noise=0.0)
    learner = StepLearner(8, 512)
    stats = past.run(900, 4, 0)
    learner.observe(stats)
    assert not learner.is_measured
    assert learner.model.base_ms + 4 * learner.model.row_ms == pytest.approx(480.0)
    learner.observe(stats)  # nothing new
    assert not learner.is_measured
    past.base, past.row = 12.0, 0.5
    learner.observe(past.run(5, 4, 0))
    assert learner.is_measured
    assert learner.model.base_ms + 4 * learner.model.row_ms == pytest.approx(14.0)


def test_dl7_nothing_is_certain_before_steps_have_been_seen() -> None:
    learner, worker, work = StepLearner(8, 512), Steps(noise=0.0), Work(100, 0, 50)
    learner.observe(worker.run(1, 1, 0))
    for steps in (CERTAIN_AFTER_STEPS // 2, CERTAIN_AFTER_STEPS // 2 - 2):
        learner.observe(worker.run(steps, 1, 0))
        assert not learner.model.known
        assert learner.model.least_ms(work.output_tokens) == 0.0
    finish_ms = learner.model.finish_ms(work)
    assert 0 < finish_ms <= learner.model.upper_ms(work)
    learner.observe(worker.run(8, 1, 0))
    assert learner.model.known
    assert 0 < learner.model.least_ms(work.output_tokens) < 50 * 12.5


def test_dl19_what_a_crowd_taught_is_certain_no_more_once_a_step_beats_it() -> None:
    worker, learner = Steps(noise=0.0), StepLearner(8, 512)
    worker.base = 100.0
    for _ in range(20):
        learner.observe(worker.run(10, 1, 0))
    assert learner.model.known
    worker.base = 10.0
    learner.observe(worker.run(10, 1, 0))
    assert not learner.model.known
    assert learner.model.least_ms(100) == 0.0
    for _ in range(7):
        learner.observe(worker.run(10, 1, 0))
    assert learner.model.least_ms(100) == pytest.approx(CERTAIN_SHARE * 1050)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers())
def test_dl7_what_is_certain_is_less_than_any_step_ever_took(
    data: st.DataObject, seed: int
) -> None:
    """Whatever the load was, and however the pace changes for the worse."""
    worker = Steps(noise=0.02, rng=random.Random(seed))
    learner = StepLearner(32, 512)
    fastest = math.inf
    windows = st.tuples(st.integers(1, 20), st.integers(1, 32), st.sampled_from([0, 0, 100]))
    for steps, rows, prompts in data.draw(st.lists(windows, min_size=8, max_size=40)):
        before = worker.busy
        learner.observe(worker.run(steps, rows, prompts))
        fastest = min(fastest, (worker.busy - before) / steps)
        if learner.model.known:
            assert learner.model.least_ms(1) <= CERTAIN_SHARE * fastest
    worker.base, worker.row = 10 * worker.base, 10 * worker.row
    for _ in range(5):
        learner.observe(worker.run(5, 8, 0))
        assert learner.model.least_ms(1) <= CERTAIN_SHARE * fastest


def test_several_tokens_a_step_count_as_such() -> None:
    """Four drafted tokens at a time: a token may take a quarter of a step."""
    learner, tokens = StepLearner(8, 512), 0
    for i in range(1, 30):
        tokens += 4 * 10 * 2
        stats = WorkerStats(*(0, 0, 0, 2, 0, 0.0, tokens, 0, 0, 0.0))
        stats = msgspec.structs.replace(stats, steps_total=10 * i, busy_ms_total=100.0 * i)
        learner.observe(stats)
    assert learner.model.least_ms(100) <= 100 * 10.0 / 4


loads = st.builds(
    Load, st.integers(0, 64), st.integers(0, 64), st.integers(0, 5000), st.integers(0, 9999)
)
works = st.builds(Work, st.integers(1, 4000), st.integers(0, 5000), st.integers(1, 2000))


@given(load=loads, work=works)
def test_a_predicted_finish_is_physical(load: Load, work: Work) -> None:
    """More work takes longer, nothing beats the least."""
    model = pace_of(16, 512, 10.0, 0.5, 0.05, prompt_tokens_per_step=20.0, fastest_ms=10.5)
    finish_ms = model.finish_ms(work, load)
    assert model.least_ms(work.output_tokens) <= finish_ms <= model.upper_ms(work, load)
    longer = Work(work.prompt_tokens, work.cached_tokens, work.output_tokens + 1)
    assert model.finish_ms(longer, load) > finish_ms


@given(budget=st.floats(0, 1e5), work=works)
def test_dl6_what_fits_is_what_service_ms_allows(budget: float, work: Work) -> None:
    model = pace_of(16, 512, 10.0, 0.5, 0.05, prompt_tokens_per_step=20.0, fastest_ms=10.5)
    count = model.tokens_within(budget, work)

    def usual(tokens: int) -> float:
        return model.service_ms(Work(work.prompt_tokens, work.cached_tokens, tokens))

    assert count == 0 or usual(count) <= budget * (1 + 1e-9)
    assert usual(count + 1) > budget * (1 - 1e-9)


def test_what_is_no_number_teaches_nothing() -> None:
    """DL-7: a NaN compares with nothing, so that a forecast of NaN would refuse everybody."""
    worker = Steps(10.0, 0.5, 0.1)
    learner = learnt(worker)
    before = learner.model
    for wrong in (math.nan, math.inf):
        learner.observe(msgspec.structs.replace(worker.run(5, 4, 0), busy_ms_total=wrong))
        learner.observe(msgspec.structs.replace(worker.run(5, 4, 0), steps_total=0, step_ms=wrong))
    assert learner.model == before
    learner.observe(worker.run(5, 4, 0))
    assert math.isfinite(learner.model.base_ms)


AT_LOAD = StepCosts((1, 8, 16, 32), (4.9, 8.8, 10.0, 15.1), 0.3)
"""The demo model on an AMD EPYC: no straight line."""


def test_dl7_steps_of_all_sizes_are_foreseen_by_what_was_measured_at_load() -> None:
    model = StepLearner(32, 512, AT_LOAD).model
    for rows, ms in zip(AT_LOAD.rows, AT_LOAD.step_ms, strict=True):
        assert model.plain_step_ms(rows) == pytest.approx(ms, rel=1e-6)
    assert model.plain_step_ms(12) == pytest.approx(9.4)
    assert model.is_foreseen and not model.known, "nothing is certain yet"


def test_dl7_a_machine_that_is_slower_than_at_load_keeps_the_shape_of_its_steps() -> None:
    learner, steps, busy_ms, tokens = StepLearner(32, 512, AT_LOAD), 0, 0.0, 0
    for rows in (1, 8, 1, 8, 1, 8) * 10:
        steps, tokens = steps + 5, tokens + 5 * rows
        busy_ms += 5 * 2 * AT_LOAD.step_ms[AT_LOAD.rows.index(rows)]
        stats = WorkerStats(*(0, 0, 0, rows, 0, 0.0, tokens, 0, 0, 0.0))
        learner.observe(msgspec.structs.replace(stats, steps_total=steps, busy_ms_total=busy_ms))
    for rows, ms in zip(AT_LOAD.rows, AT_LOAD.step_ms, strict=True):
        assert learner.model.plain_step_ms(rows) == pytest.approx(2 * ms, rel=0.1)


def test_dl7_what_was_measured_next_to_others_work_is_doubted_until_enough_steps_ran() -> None:
    learner = StepLearner(32, 512, msgspec.structs.replace(AT_LOAD, doubt=1.5))
    assert learner.model.spread > 1.5 > StepLearner(32, 512, AT_LOAD).model.spread
    assert learner.model.plain_step_ms(16) == pytest.approx(4.9 + 15 / 31 * (15.1 - 4.9))
    worker = Steps(4.4, 0.35, 0.3)
    for _ in range(20):
        learner.observe(worker.run(5, 8, 0))
    assert learner.model.known and learner.model.spread < 0.5
