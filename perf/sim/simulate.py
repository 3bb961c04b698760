"""Runs a load through a real orchestrator on virtual time, and records the outcome of each
request."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace

from orchestrator.errors import TidegateError
from orchestrator.service import Orchestrator
from orchestrator.settings import load_settings
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Part, Parts
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.task import Task
from perf.sim.arrivals import SimArrival
from perf.sim.replay.loop import VirtualClock, VirtualLoop, run_quietly
from perf.sim.replay.service import VirtualInstance, VirtualService, new_service, virtual_card
from perf.sim.replay.worker import SimWorker, WorkerSpec
from protocol import Delta, Outcome, Sampling

MODEL = "sim"
_FOREVER_MS = 1.7e6
_WATCH_EVERY_S = 0.001
_LOOK_EVERY_S = 1.0
_KEPT = "kept"


@dataclass(slots=True)
class SimResult:
    """Fate of one arrival. Times are seconds of the simulation; 0 where it never came to that."""

    arrival: SimArrival
    outcome: Outcome | None = None
    code: str = ""
    dispatched_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0
    endings: int = 0
    sampled: bool = False
    """Whether it would have been refused, and was let in to see what becomes of it."""
    pauses: int = 0
    fitted: bool = False
    part_missed: bool = False
    """Whether it ended because a part of its answer was late (DL-14)."""

    @property
    def met(self) -> bool:
        """Whether it was met by the client's own clock and deadline, whatever the service knew of
        it."""
        in_time = self.ended_s <= self.arrival.at_s + self.arrival.deadline_ms / 1000
        return self.outcome is Outcome.MET and in_time


@dataclass(slots=True)
class SimRun:
    """A simulation that has ended."""

    results: list[SimResult]
    seconds: float
    orchestrator: Orchestrator
    workers: list[SimWorker]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances behind the orchestrator, all alike."""

    spec: WorkerSpec
    count: int = 2
    context_tokens: int = 4096
    block_tokens: int = 16


WorkerEvent = Callable[[list[SimWorker]], None]
"""Event that changes something about the workers."""


def simulate(
    arrivals: Iterable[SimArrival],
    fleet: Fleet,
    settings: Mapping[str, str],
    *,
    seed: int,
    states_deadline: bool = True,
    events: Mapping[float, WorkerEvent] | None = None,
    linger_s: float = 5.0,
    watch: Callable[[Orchestrator, float], None] | None = None,
    kept: int | None = None,
    new_driver: "Callable[[Orchestrator, VirtualClock, bool], Driver] | None" = None,
) -> SimRun:
    """Run ``arrivals`` to their ends, or to ``linger_s`` after the last came; then what is left is
    ended.

    ``events`` happen at their times. ``watch`` is called every millisecond; what it raises, the
    simulation does. With ``kept``, nothing but its deadline stops the arrival of that number (-1:
    none is meant), and no other refusal is sampled.

    ``new_driver`` submits the arrivals, by default just as they are.

    ``settings`` are names in capitals, as in the environment without ``TIDEGATE_``.
    """
    arrivals = list(arrivals)
    end_s = (arrivals[-1].at_s if arrivals else 0.0) + linger_s

    async def run(loop: VirtualLoop) -> SimRun:
        clock = VirtualClock(loop)
        service = new_orchestrator(fleet, clock, settings, random.Random(seed))
        workers, orchestrator = list(service.workers.values()), service.parts.orchestrator
        service.parts.lifecycle.start()
        driver = (new_driver or Driver)(orchestrator, clock, states_deadline)
        if kept is not None:
            orchestrator.stages.prediction.feasibility.stats.in_sample = lambda task: (
                task.correlation_id == _KEPT
            )
        for number, arrival in enumerate(arrivals):
            loop.call_at(arrival.at_s, driver.arrive, arrival, _KEPT if number == kept else "")
        for at_s, event in (events or {}).items():
            loop.call_at(at_s, event, workers)
        every_s = _LOOK_EVERY_S if watch is None else _WATCH_EVERY_S
        # A timer may be a nanosecond early: what is left then would never pass.
        while (left_s := end_s - clock.now()) > 1e-6 and not (
            len(driver.results) == len(arrivals) and not driver.clients
        ):
            await asyncio.sleep(min(every_s, left_s))
            if watch is not None:
                watch(orchestrator, clock.now())
        await service.parts.lifecycle.drain(0.0)
        await service.parts.lifecycle.close()
        driver.stop()
        return SimRun(driver.results, end_s - linger_s, orchestrator, workers)

    return run_quietly(run)


def new_orchestrator(
    fleet: Fleet,
    clock: VirtualClock,
    settings: Mapping[str, str],
    rng: random.Random,
) -> VirtualService:
    """An orchestrator that has not started yet, and its workers."""
    addresses = [f"10.0.0.{i + 1}:8001" for i in range(fleet.count)]
    card = virtual_card(MODEL, fleet.spec, fleet.context_tokens, fleet.block_tokens)
    machine = VirtualInstance(fleet.spec, card)
    values = {"instances": ",".join(addresses), "telemetry__log_level": "warning"}
    values |= {name.lower(): value for name, value in settings.items()}
    machines = dict.fromkeys(addresses, machine)
    return new_service(machines, clock, load_settings(**values), rng)


def new_job(arrival: SimArrival, now: float, budget_ms: float) -> tuple[Job, tuple[int, ...]]:
    """Job that an API would make of an arrival, and its prompt."""
    job = Job(
        api=Api.COMPLETIONS,
        model=MODEL,
        sampling=Sampling(max_tokens=arrival.max_tokens, ignore_eos=not arrival.is_open),
        max_tokens=arrival.max_tokens,
        deadline=Deadline(now + min(budget_ms, _FOREVER_MS) / 1000, 0),
        parts=_parts(arrival, now),
        correlation_id="",
        arrived=now,
        on_deadline=arrival.on_deadline,
        priority=arrival.priority,
        tenant=arrival.tenant,
        session_id=arrival.session,
    )
    return job, arrival.prompt


def _parts(arrival: SimArrival, now: float) -> Parts:
    if arrival.first_token_ms == arrival.token_gap_ms == math.inf:
        return NO_PARTS
    first_at = now + arrival.first_token_ms / 1000
    return Parts(first_at, arrival.token_gap_ms / 1000, cut_at=first_at)


class Driver:
    """Submits arrivals when they are due."""

    def __init__(
        self, orchestrator: Orchestrator, clock: VirtualClock, states_deadline: bool
    ) -> None:
        self.results: list[SimResult] = []
        self.orchestrator = orchestrator
        self.clock = clock
        self._states_deadline = states_deadline
        self.clients: set[asyncio.Task[None]] = set()
        """Clients that are not done."""

    def arrive(self, arrival: SimArrival, name: str) -> None:
        result = SimResult(arrival)
        self.results.append(result)
        self.spawn(self.submit(arrival, result, name))

    def spawn(self, client: Coroutine[object, object, None]) -> None:
        """Have a client do what it does; the simulation lasts until all are done."""
        task = asyncio.ensure_future(client)
        self.clients.add(task)
        task.add_done_callback(self.clients.discard)

    async def submit(self, arrival: SimArrival, result: SimResult, name: str) -> None:
        """Submit one arrival; ``name`` is its correlation id."""
        budget_ms = arrival.deadline_ms if self._states_deadline else _FOREVER_MS
        job, prompt = new_job(arrival, self.clock.now(), budget_ms)
        await self.ask(replace(job, correlation_id=name), prompt, result)

    def accepted(self, task: Task) -> None:
        """Hear of a task that has just been accepted."""

    def stop(self) -> None:
        """End the clients that are still there."""
        for task in list(self.clients):
            task.cancel()

    async def ask(
        self, job: Job, prompt: tuple[int, ...], result: SimResult
    ) -> Task | TidegateError:
        """The task of a job, with its end; or the error with which it was refused at once."""
        listener = ResultListener(result)
        try:
            task = await self.orchestrator.submit(job, prompt, [listener])
        except TidegateError as error:
            result.outcome, result.code = Outcome.REFUSED, error.code
            result.ended_s = self.clock.now()
            result.endings += 1
            return error
        self.accepted(task)
        await listener.is_over.wait()
        return task


class ResultListener:
    """Records a task's end."""

    def __init__(self, result: SimResult) -> None:
        self._result = result
        self.is_over = asyncio.Event()

    def started(self, task: Task) -> None:
        """Ignore the start: the task's marks have it."""

    def tokens(self, task: Task, delta: Delta) -> None:
        """Ignore the tokens: the task's count has them."""

    def ended(self, task: Task) -> None:
        result, ending = self._result, task.ending
        assert ending is not None
        result.outcome = ending.outcome
        result.code = ending.error.code if ending.error is not None else ""
        result.dispatched_s = task.marks.dispatched
        result.first_s = task.marks.first_token
        result.ended_s = task.marks.ended
        result.tokens = task.completion_tokens
        result.sampled = task.refusal_sample
        result.pauses = task.pauses
        result.part_missed = ending.missed_part not in (None, Part.WHOLE)
        result.fitted = task.fitted_tokens is not None
        result.endings += 1
        self.is_over.set()
