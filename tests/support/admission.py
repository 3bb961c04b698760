"""Admission and dispatch over one instance of a fixed speed, with nobody to send anything to."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

from orchestrator.admission.admission import Admission, AdmissionConfig
from orchestrator.dispatch.attempt import AttemptsInFlight
from orchestrator.dispatch.completion import Completion
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.launch import Launcher
from orchestrator.dispatch.metrics import DispatchMetrics
from orchestrator.dispatch.pausing import Pausing
from orchestrator.dispatch.time_limits import TimeLimits
from orchestrator.errors import DeadlineInfeasible
from orchestrator.instances.candidate import Candidate
from orchestrator.instances.prefix_index import PrefixIndex
from orchestrator.placement.placer import Placer
from orchestrator.prediction.feasibility import AdmissionMode, Feasibility, FeasibilityConfig
from orchestrator.prediction.forecaster import Capacity, Forecaster
from orchestrator.prediction.prediction import Prediction
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.quotes import Quotes
from orchestrator.prediction.schedule import Schedule
from orchestrator.prediction.step_model import StepModel
from orchestrator.queue.order import QueuePolicy
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.metrics import TaskMetrics
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Task
from orchestrator.telemetry.metrics import Metrics
from protocol import Sampling
from tests.support.clock import ManualClock
from tests.support.jobs import make_job
from tests.support.paces import pace_of

# 10 ms a step alone, 18 ms with all 16 rows; 0.1 ms per prompt token.
PACE = pace_of(16, 512, 9.5, 0.5, 0.1, fastest_ms=10.0, steps=1000)


UNKNOWN = pace_of(16, 512, 9.5, 0.5, 0.1)

REFUSES_CERTAIN: dict[str, Any] = {
    "mode": AdmissionMode.ENFORCE,
    "least_chance": 0.0,
    "refusal_cap": 1.0,
    "sample": 0.0,
}


class Site:
    """A registry with one instance: as much of one as admission asks for."""

    def __init__(self, load: int = 0) -> None:
        self.load = load
        self.snapshot_version = 1
        self.prefixes = PrefixIndex()
        self.instances: dict[str, object] = {}

    def __iter__(self) -> Iterator[object]:
        return iter(self.instances.values())

    def dark_s(self, model: str) -> float:
        return 0.0

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
        self.queue: TaskQueue[Task] = TaskQueue(bound, policy=policy)
        self.capacity = Capacity((pace,), 16, max(0, 16 - load), min_start_ms, 1.0)
        self.forecaster = Forecaster(lambda model: self.capacity)
        site: Any = Site(load)
        placer = Placer(site, self.clock, self.forecaster.usual_tokens)
        in_flight = AttemptsInFlight()
        self.running: list[Any] = []
        schedule = Schedule(self.queue, self.forecaster, self.running, self.clock)
        self.schedule = schedule
        promises = Promises(self.forecaster, self.clock)
        self.feasibility = Feasibility(
            self.forecaster,
            schedule,
            promises,
            self.clock,
            random.Random(1),
            FeasibilityConfig(**REFUSES_CERTAIN | feasibility),
        )
        prediction = Prediction(
            self.forecaster,
            schedule,
            promises,
            Quotes(self.forecaster, schedule, promises, self.clock),
            self.feasibility,
        )
        self.prediction = prediction
        config = AdmissionConfig(floor_ms=10.0, default_max_tokens=64)
        self.admission = Admission(site, placer, prediction, self.clock, config)
        metrics, nobody = Metrics(), cast(Any, None)
        freed = DispatchMetrics(metrics)
        settler = Settler(TaskMetrics(metrics, self.clock), self.clock)
        limits = TimeLimits(return_margin_s=0.0)
        pausing = Pausing(site, self.forecaster, placer, enabled=False)
        self.dispatcher = Dispatcher(
            self.queue,
            placer,
            prediction,
            Launcher(site, in_flight, pausing, prediction, nobody, limits, self.clock),
            Completion(site, settler, freed, prediction, nobody, self.clock),
            self.clock,
        )

    def admit(self, task: Task) -> None:
        self.admission.finish(task)
        self.dispatcher.require_room(task)

    def task(self, budget_ms: float, tokens: int = 100, prompt: int = 100, **job: object) -> Task:
        sampling = Sampling(max_tokens=tokens, ignore_eos=bool(job.pop("ignore_eos", True)))
        now = self.clock.now()
        stated = {"sampling": sampling, "max_tokens": tokens, "arrived": now}
        deadline = Deadline(now + budget_ms / 1000, 0)
        task = Task(str(random.random()), make_job(**{**stated, "deadline": deadline, **job}))
        task.model, task.prompt_tokens = "m", prompt
        return task

    def refuses(self, task: Task) -> bool:
        try:
            self.admission.finish(task)
        except DeadlineInfeasible:
            return True
        return False
