"""DL-7: only what is certain to miss is refused, and how often that was wrong is known."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from orchestrator.admission.admission import Admission, AdmissionConfig
from orchestrator.api.http.responses import error_headers
from orchestrator.api.native.errors import error_object
from orchestrator.api.openai.errors import error_body
from orchestrator.dispatch.attempt import AttemptsInFlight
from orchestrator.dispatch.completion import Completion
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.launch import Launcher
from orchestrator.dispatch.metrics import DispatchMetrics
from orchestrator.dispatch.pausing import Pausing
from orchestrator.dispatch.time_limits import TimeLimits
from orchestrator.errors import DeadlineInfeasible, QueueFull
from orchestrator.placement import Candidate, Placer, PrefixIndex
from orchestrator.prediction import StepModel
from orchestrator.prediction.calibration import Calibration
from orchestrator.prediction.feasibility import AdmissionMode, Feasibility, FeasibilityConfig
from orchestrator.prediction.forecaster import Capacity, Forecaster
from orchestrator.prediction.prediction import Prediction
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.start_times import StartTimes
from orchestrator.queue.order import QueueOrder, QueuePolicy
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api, Job, Priority
from orchestrator.tasks.journal.memory import MemoryJournal
from orchestrator.tasks.metrics import TaskMetrics
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import refused
from orchestrator.telemetry.metrics import Metrics
from tests.support.clock import ManualClock
from worker.protocol import End, FinishReason, OnDeadline, Outcome, Sampling

# 10 ms a step alone, 18 ms with all 16 rows; 0.1 ms per prompt token.
PACE = StepModel(16, 512, 9.5, 0.5, 0.1, 0.0, (1.0, 1.25), fastest_ms=10.0)
UNKNOWN = StepModel(16, 512, 9.5, 0.5, 0.1, 0.0, (1.0, 1.25))


class Site:
    """A registry with one instance: as much of one as admission asks for."""

    def __init__(self, load: int = 0) -> None:
        self.load = load
        self.snapshot_version = 1
        self.prefixes = PrefixIndex()
        self.instances: dict[str, object] = {}

    def __iter__(self) -> Iterator[object]:
        return iter(self.instances.values())

    def any_ready(self, model: str) -> bool:
        return True

    def candidates(self) -> Sequence[Candidate]:
        return [self.candidate("a")]

    def candidate(self, name: str) -> Candidate:
        return Candidate(name, "m", b"", True, 16, self.load)


class Rig:
    """Admission over a fixed pace."""

    def __init__(
        self,
        pace: StepModel = PACE,
        load: int = 0,
        bound: int = 100,
        min_start_ms: float = 0.0,
        policy: QueuePolicy = QueuePolicy.REJECT,
        **feasibility: Any,
    ) -> None:
        self.clock = ManualClock()
        self.queue: TaskQueue[Task] = TaskQueue(bound, QueueOrder.SLACK, policy)
        self.capacity = Capacity((pace,), 16, max(0, 16 - load), min_start_ms)
        self.forecaster = Forecaster(lambda model: self.capacity, drops_infeasible=True)
        site: Any = Site(load)
        placer = Placer(site, self.clock, self.forecaster.usual_tokens)
        in_flight = AttemptsInFlight()
        start_times = StartTimes(self.queue, self.forecaster, in_flight, self.clock)
        promises = Promises(self.forecaster, self.clock)
        self.feasibility = Feasibility(
            self.forecaster,
            start_times,
            promises,
            self.clock,
            random.Random(1),
            FeasibilityConfig(**{"sample": 0.0} | feasibility),
        )
        prediction = Prediction(
            self.forecaster, start_times, promises, self.feasibility, Calibration()
        )
        config = AdmissionConfig(floor_ms=10.0, default_max_tokens=64)
        self.admission = Admission(site, self.queue, placer, prediction, self.clock, config)
        metrics, nobody = Metrics(), cast(Any, None)
        freed = DispatchMetrics(metrics)
        settler = Settler(TaskMetrics(metrics), MemoryJournal(), self.clock)
        limits = TimeLimits(grace_s=0.1, return_margin_s=0.0)
        self.dispatcher = Dispatcher(
            self.queue,
            placer,
            Pausing(site, self.forecaster, placer, enabled=False),
            prediction,
            Launcher(site, in_flight, prediction, nobody, nobody, limits, self.clock),
            Completion(site, settler, freed, prediction, nobody, nobody, self.clock),
            self.clock,
        )

    def admit(self, task: Task) -> None:
        self.admission.finish(task)
        self.dispatcher.require_room(task)

    def task(self, budget_ms: float, tokens: int = 100, prompt: int = 100, **job: object) -> Task:
        sampling = Sampling(max_tokens=tokens, ignore_eos=bool(job.pop("ignore_eos", True)))
        values: dict[str, object] = {
            "api": Api.NATIVE,
            "model": "m",
            "sampling": sampling,
            "max_tokens": tokens,
            "deadline": Deadline(self.clock.now() + budget_ms / 1000, 0),
            "correlation_id": "c",
            "arrived": self.clock.now(),
        }
        task = Task(str(random.random()), Job(**values | job))  # type: ignore[arg-type]
        task.model, task.prompt_tokens = "m", prompt
        return task

    def refuses(self, task: Task) -> bool:
        try:
            self.admission.finish(task)
        except DeadlineInfeasible:
            return True
        return False


def test_dl7_the_least_work_at_the_best_pace_decides() -> None:
    """100 tokens alone take 100 steps of 10 ms; nobody was ever faster than 0.8 of that."""
    rig = Rig()
    assert rig.refuses(rig.task(790))
    assert not rig.refuses(rig.task(815))
    assert rig.feasibility.stats.refused == 1


def test_dl7_what_is_unknown_refuses_nobody() -> None:
    rig = Rig(UNKNOWN)
    assert not rig.refuses(rig.task(20))


def test_dl7_an_open_end_only_counts_what_is_certain() -> None:
    """max_tokens says nothing about an answer that may stop at once; min_tokens does."""
    rig = Rig()
    assert not rig.refuses(rig.task(50, ignore_eos=False))
    task = rig.task(50, ignore_eos=False)
    task.sampling = Sampling(max_tokens=100, min_tokens=50)
    assert rig.refuses(task)


def test_dl7_what_was_learnt_refuses_nobody() -> None:
    """A thousand answers of 50 tokens: the next may still stop at once."""
    rig = Rig()
    for _ in range(1000):
        done = rig.task(1000, ignore_eos=False)
        end = End(0, FinishReason.STOP, 100, 50, 0.0, 10.0, 900.0, 0.0)
        rig.forecaster.ended(done, end, None, None)
    task = rig.task(20, ignore_eos=False)
    assert not rig.refuses(task)
    assert task.is_background  # but it gets what nobody else wants
    assert not rig.task(1000, ignore_eos=False).is_background


def test_dl7_a_partial_answer_needs_a_token_and_no_more() -> None:
    """Though its client asked for all of max_tokens: it takes what there is."""
    rig = Rig()
    assert rig.refuses(rig.task(500))
    assert not rig.refuses(rig.task(20, on_deadline=OnDeadline.PARTIAL))


def test_dl7_a_refusal_says_what_would_do() -> None:
    rig = Rig()
    with pytest.raises(DeadlineInfeasible) as refusal:
        rig.admission.finish(rig.task(500))
    error = refusal.value
    assert (error.status, error.code) == (504, "deadline_infeasible")
    assert error_headers(error)["x-should-retry"] == "false"
    details = error.details
    assert details["binding_constraint"] == "decode"
    assert isinstance(details["predicted_finish_ms"], float)
    assert details["predicted_finish_ms"] > 500
    earliest = details["earliest_feasible_deadline"]
    assert isinstance(earliest, int)
    again = rig.task(earliest - 1000 * rig.clock.unix())
    assert not rig.refuses(again)
    slow_ms = rig.forecaster.forecast(again).slow_ms
    assert slow_ms <= again.deadline.left_ms(rig.clock.now()) + 1
    for body in (error_body(error)["error"], error_object(error)):
        assert isinstance(body, dict)
        assert body["code"] == "deadline_infeasible"
        assert body["predicted_finish_ms"] == details["predicted_finish_ms"]


@pytest.mark.parametrize(
    ("tokens", "prompt", "floor_ms", "binding"),
    [(100, 10, 0, "decode"), (1, 1, 100, "route"), (1, 50_000, 100, "route")],
)
def test_dl7_the_binding_constraint(
    tokens: int, prompt: int, floor_ms: float, binding: str
) -> None:
    rig = Rig(min_start_ms=floor_ms)
    error = rig.feasibility.infeasible(rig.task(11, tokens, prompt), can_start=True)
    assert error.details["binding_constraint"] == binding


def test_dl8_what_waited_in_vain_was_bound_by_the_queue() -> None:
    rig = Rig(load=16)
    task = rig.task(1500)
    rig.admission.finish(task)
    task.marks.queued = rig.clock.now()
    rig.queue.push(task)
    assert rig.queue.expired(rig.clock.now()) == []
    rig.clock.advance(1.0)
    assert rig.queue.expired(rig.clock.now()) == [task]
    assert (
        rig.feasibility.infeasible(task, can_start=False).details["binding_constraint"] == "queue"
    )


def test_dl7_a_faster_instance_that_has_come_since_is_a_chance() -> None:
    """A plan looks at what serves a model four times a second; who is to leave is looked at now."""
    rig = Rig()
    task = rig.task(1000)
    rig.admission.finish(task)
    rig.clock.advance(0.21)
    assert task.drop_at < rig.clock.now()
    fast = StepModel(16, 512, 0.95, 0.05, 0.01, 0.0, (1.0, 1.25), fastest_ms=1.0)
    slow, rig.capacity = rig.capacity, Capacity((PACE, fast), 32, 32, 0.0)
    assert not rig.feasibility.gives_up(task)
    assert task.drop_at > rig.clock.now() + 0.5
    rig.capacity = slow
    assert rig.feasibility.gives_up(task)


def test_dl7_off_and_observe_refuse_nothing() -> None:
    off = Rig(mode=AdmissionMode.OFF)
    assert not off.refuses(off.task(100))
    assert off.feasibility.stats.infeasible == 0
    observe = Rig(mode=AdmissionMode.OBSERVE)
    task = observe.task(100)
    assert not observe.refuses(task)
    assert observe.feasibility.stats.infeasible == 1
    assert task.refusal_sample
    assert task.drop_at == task.deadline.at


def test_dl7_the_cap_lets_the_rest_in() -> None:
    rig = Rig(refusal_cap=0.5)
    refused_count = sum(rig.refuses(rig.task(100)) for _ in range(2000))
    assert 0.45 < refused_count / 2000 < 0.6


def test_dl7_a_cap_of_nothing_refuses_nobody() -> None:
    """Neither at the door nor later, out of the queue."""
    rig = Rig(refusal_cap=0.0)
    task = rig.task(100)
    assert not rig.refuses(task)
    assert not rig.feasibility.gives_up(rig.task(100))
    assert rig.feasibility.stats.refused == 0


def test_dl7_the_cap_counts_what_is_refused_late() -> None:
    rig = Rig(refusal_cap=0.5)
    refused_count = sum(rig.feasibility.gives_up(rig.task(100)) for _ in range(2000))
    assert 0.0 < refused_count / 2000 < 0.6


def test_dl7_a_sample_measures_the_false_refusals() -> None:
    rig = Rig(sample=0.1)
    tasks = [rig.task(100) for _ in range(1000)]
    let_in = [task for task in tasks if not rig.refuses(task)]
    assert 60 < len(let_in) < 140
    for index, task in enumerate(let_in):
        outcome = Outcome.MET if index < 5 else Outcome.MISSED
        task.end(Ending(outcome, FinishReason.STOP), rig.clock.now())
    assert rig.feasibility.stats.false_rate == pytest.approx(5 / len(let_in))


def test_dl6_fit_shrinks_to_what_the_deadline_allows() -> None:
    rig = Rig()
    task = rig.task(1000, 500, on_deadline=OnDeadline.FIT)
    rig.forecaster.fit(task, 1000)  # when it starts: only then is it known what is left
    assert task.fitted_tokens == task.sampling.max_tokens
    # 1000 ms / 10 ms alone on the instance, less the prompt: most of the budget (DL-16).
    assert 85 <= task.sampling.max_tokens <= 100
    rig.forecaster.fit(task, 500)
    assert 40 <= task.sampling.max_tokens <= 50
    rig.forecaster.fit(task, 1000)
    assert task.sampling.max_tokens <= 50
    busy = Rig(load=15)
    full = busy.task(1000, 500, on_deadline=OnDeadline.FIT)
    busy.forecaster.fit(full, 1000)
    assert 45 <= full.sampling.max_tokens <= 56  # 18 ms a token among 16
    enough = rig.task(60_000, 500, on_deadline=OnDeadline.FIT)
    rig.forecaster.fit(enough, 60_000)
    assert (enough.fitted_tokens, enough.sampling.max_tokens) == (None, 500)


def fill(rig: Rig, priority: Callable[[int], Priority], count: int = 4) -> list[Task]:
    tasks = [rig.task(60_000, priority=priority(i)) for i in range(count)]
    for task in tasks:
        rig.admit(task)
        rig.queue.push(task)
    return tasks


def test_or4_reject_says_when_to_come_again() -> None:
    rig = Rig(load=16, bound=4)
    fill(rig, lambda i: Priority.BATCH)
    with pytest.raises(QueueFull) as full:
        rig.admit(rig.task(60_000))
    assert full.value.retry_after_ms > 0  # how good it is: tests/perf/test_sim_reported.py


def test_or4_drop_lru_drops_the_oldest_batch_task() -> None:
    rig = Rig(load=16, bound=4, policy=QueuePolicy.DROP_LRU)
    tasks = fill(rig, lambda i: Priority.BATCH if i in (1, 2) else Priority.INTERACTIVE)
    for expected in (tasks[1], tasks[2]):
        newcomer = rig.task(60_000)
        rig.admit(newcomer)
        assert expected not in rig.queue
        assert expected.ending is not None and expected.ending.outcome is Outcome.REFUSED
        rig.queue.push(newcomer)
    with pytest.raises(QueueFull):
        rig.admit(rig.task(60_000))


def test_a_drop_is_a_refusal() -> None:
    assert refused(QueueFull("x")).outcome is Outcome.REFUSED


def test_dl7_a_sample_of_what_waited_in_vain_gets_its_try() -> None:
    """It leaves only at its deadline, and is never in the background."""
    rig = Rig(load=16, sample=1.0)
    task, other = rig.task(1500), rig.task(5000)
    for each in (task, other):
        rig.admit(each)
        rig.queue.push(each)
    rig.clock.advance(1.0)
    assert rig.queue.expired(rig.clock.now()) == [task]
    assert not rig.feasibility.gives_up(task)
    rig.queue.push(task)
    assert rig.queue.expired(rig.clock.now()) == []
    assert not task.is_background
    rig.clock.advance(0.6)
    assert rig.queue.expired(rig.clock.now()) == [task]
    task.end(Ending(Outcome.MISSED, FinishReason.DEADLINE), rig.clock.now())
    assert (rig.feasibility.stats.infeasible, rig.feasibility.stats.sampled_missed) == (1, 1)
