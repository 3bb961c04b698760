"""Computes how many instances keep deadlines under a load: ``tidegate plan``.

A simulation in virtual time of what the service does, as far as it decides how many are needed:
requests come at random (Poisson) into one queue, first come, first served, which is most urgent
first where all have the same deadline. Each goes to the instance with the fewest rows as soon as
one has room, and is given up when it can no longer be in time. An instance's steps take what its
``StepModel`` says. How many rows run at once is tried out, as the service's row control does.

``tests/perf/test_fleet_size.py`` compares it with the simulator that runs the real orchestrator and
scheduler.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from orchestrator.prediction.step_model import StepModel, Work

_MIN_REQUESTS, _MAX_REQUESTS = 4000, 40_000
"""Requests of one simulation: with 4000 a share of 99 % is known to some 0.3 %."""
_DEADLINES = 10
"""Length of a simulation in deadlines, as far as ``_MAX_REQUESTS`` allows: a queue that grows
shows only after some."""
_ROW_SHARES = (0.5, 0.65, 0.8, 0.9, 1.0)
"""Shares of the deadline that a request may take in as many rows as are tried."""
MAX_INSTANCES = 4096
MORE = 1.1
"""A tenth more load."""


class PlanError(ValueError):
    """Raised where no number of instances will do; the message says why."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """A load of requests that are all alike. ``per_s`` come each second."""

    per_s: float
    deadline_ms: float
    work: Work

    def times(self, factor: float) -> "OfferedLoad":
        return OfferedLoad(self.per_s * factor, self.deadline_ms, self.work)


@dataclass(frozen=True, slots=True)
class FleetEstimate:
    """What a number of instances keeps. ``kept`` is a share of all requests, ``busy`` of the
    instances' rows; times are ms."""

    instances: int
    rows: int
    kept: float
    busy: float
    wait_p95_ms: float
    total_p95_ms: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fewest instances that keep a share of deadlines, and the load after a tenth more."""

    enough: FleetEstimate
    with_more: FleetEstimate
    """``enough`` instances under a tenth more load."""
    enough_for_more: FleetEstimate
    """The fewest instances that keep as much of a tenth more load."""


def plan_fleet(model: StepModel, load: OfferedLoad, keep: float = 0.99, seed: int = 1) -> FleetPlan:
    """Find the fewest instances that keep the share ``keep`` of deadlines. Raises ``PlanError``."""
    enough = _fewest(model, load, keep, seed)
    more = load.times(MORE)
    return FleetPlan(
        enough,
        estimate(model, more, enough.instances, seed),
        _fewest(model, more, keep, seed, least=enough.instances),
    )


def estimate(model: StepModel, load: OfferedLoad, instances: int, seed: int = 1) -> FleetEstimate:
    """What ``instances`` keep with the best of the numbers of rows that are tried. Raises
    ``PlanError`` where not even a request that is alone is in time."""
    tried = [_simulate(model, load, instances, rows, seed) for rows in _rows(model, load)]
    return max(tried, key=lambda found: (found.kept, -found.rows))


def _rows(model: StepModel, load: OfferedLoad) -> list[int]:
    """Numbers of rows with which a request takes some shares of its deadline."""
    alone_ms = _service_ms(model, load.work, 1)
    if alone_ms > load.deadline_ms:
        raise PlanError(
            f"a request takes {alone_ms / 1000:.2f} s on an instance of its own, and its deadline "
            f"is {load.deadline_ms / 1000:.2f} s: no number of instances keeps that"
        )
    fitting = {
        max(
            (n for n in range(1, model.slots + 1) if _service_ms(model, load.work, n) <= most_ms),
            default=1,
        )
        for most_ms in (share * load.deadline_ms for share in _ROW_SHARES)
    }
    return sorted(fitting)


def _service_ms(model: StepModel, work: Work, rows: int) -> float:
    """A request's usual time among ``rows`` that are like it, whose prompts are computed between
    its tokens."""
    new = max(1, work.prompt_tokens - work.cached_tokens)
    steps = -(-new // model.step_tokens) + work.output_tokens - 1
    others = (rows - 1) * new / max(1, steps)
    return replace(model, prompt_tokens_per_step=others).service_ms(work, rows)


def _fewest(
    model: StepModel, load: OfferedLoad, keep: float, seed: int, least: int = 1
) -> FleetEstimate:
    """Raises ``PlanError``."""
    # With fewer the queue would grow for as long as the load lasts.
    low = max(least, 1 + math.floor(load.per_s * _cheapest_ms(model, load) / 1000))
    if low > MAX_INSTANCES:
        raise PlanError(f"more than {MAX_INSTANCES} instances would be needed")
    high, found = low, estimate(model, load, low, seed)
    while found.kept < keep:
        low, high = high + 1, high + max(1, high // 8)
        if high > MAX_INSTANCES:
            raise PlanError(f"more than {MAX_INSTANCES} instances would be needed")
        found = estimate(model, load, high, seed)
    while low < high:
        middle = (low + high) // 2
        tried = estimate(model, load, middle, seed)
        if tried.kept >= keep:
            high, found = middle, tried
        else:
            low = middle + 1
    return found


def _cheapest_ms(model: StepModel, load: OfferedLoad) -> float:
    """An instance's time for one request in the most rows: fewer instances than that cannot do."""
    rows = _rows(model, load)[-1]
    return _service_ms(model, load.work, rows) / rows


@dataclass(slots=True)
class _Request:
    came_ms: float
    prompt_left: int
    steps_left: int


@dataclass(eq=False, slots=True)
class _Instance:
    """Rows that step together. Of several steps in which nothing changes only the end is played."""

    number: int
    joining: list[_Request] = field(default_factory=list)
    """Rows that begin with the next step."""
    prompts: deque[_Request] = field(default_factory=deque)
    """Rows whose prompt is not computed yet, in order."""
    ends: list[tuple[int, int, _Request]] = field(default_factory=list)
    """Rows that decode, by the step that is their last."""
    step: int = 0
    until_ms: float = 0.0
    """When the steps under way are over."""
    began_ms: float = 0.0
    each_ms: float = 0.0
    version: int = 0
    """Changes when what was foreseen for this instance no longer holds."""

    @property
    def rows(self) -> int:
        return len(self.joining) + len(self.prompts) + len(self.ends)


class _Simulation:
    """One run: time only moves forward, from event to event."""

    def __init__(self, model: StepModel, load: OfferedLoad, instances: int, rows: int) -> None:
        self._model = model
        self._load = load
        self._rows = rows
        all_of_them = {number: _Instance(number) for number in range(instances)}
        self._by_rows: list[dict[int, _Instance]] = [all_of_them, *({} for _ in range(rows))]
        """The instances by how many rows each has."""
        self._waiting: deque[_Request] = deque()
        self._events: list[tuple[float, int, int, _Instance]] = []
        self._order = 0
        self._patience_ms = load.deadline_ms - _service_ms(model, load.work, rows)
        self.totals_ms: list[float] = []
        self.waits_ms: list[float] = []
        self.row_ms = 0.0

    def run(self, arrivals_ms: list[float]) -> None:
        for now_ms in arrivals_ms:
            self._play_until(now_ms)
            work = self._load.work
            new = max(1, work.prompt_tokens - work.cached_tokens)
            self._waiting.append(_Request(now_ms, new, work.output_tokens - 1))
            self._dispatch(now_ms)
        self._play_until(math.inf)

    def _play_until(self, now_ms: float) -> None:
        while self._events and self._events[0][0] <= now_ms:
            at_ms, _, version, instance = heappop(self._events)
            if version == instance.version:
                self._steps_over(instance, at_ms)
                self._dispatch(at_ms)
                self._go_on(instance, at_ms)

    def _dispatch(self, now_ms: float) -> None:
        while self._waiting:
            request = self._waiting[0]
            if now_ms - request.came_ms > self._patience_ms:
                self._waiting.popleft()  # certain to be late
                continue
            instance = self._least_taken()
            if instance is None:
                return
            self._waiting.popleft()
            self.waits_ms.append(now_ms - request.came_ms)
            self._join(instance, request, now_ms)

    def _least_taken(self) -> _Instance | None:
        """One of those with the fewest rows; None where none has room."""
        roomy = next((level for level in self._by_rows[: self._rows] if level), None)
        return None if roomy is None else next(iter(roomy.values()))

    def _count(self, instance: _Instance, before: int) -> None:
        """Note that an instance had ``before`` rows, and has others now."""
        del self._by_rows[before][instance.number]
        self._by_rows[instance.rows][instance.number] = instance

    def _join(self, instance: _Instance, request: _Request, now_ms: float) -> None:
        """Have a request begin with the instance's next step."""
        was_idle = instance.rows == 0 and instance.until_ms <= now_ms
        if not was_idle and instance.until_ms > now_ms and instance.each_ms:
            done = max(1, math.ceil((now_ms - instance.began_ms) / instance.each_ms))
            boundary_ms = instance.began_ms + done * instance.each_ms
            if boundary_ms < instance.until_ms - 1e-6:
                instance.until_ms = boundary_ms
                self._foresee(instance)
        instance.joining.append(request)
        self._count(instance, instance.rows - 1)
        if was_idle:
            self._go_on(instance, now_ms)

    def _go_on(self, instance: _Instance, now_ms: float) -> None:
        """Begin the next steps, up to the first in which something changes."""
        if not instance.rows or instance.until_ms > now_ms:
            return
        instance.prompts.extend(instance.joining)
        instance.joining.clear()
        model, rows = self._model, instance.rows
        each_ms = (model.base_ms + model.row_ms * rows) * model.mid
        steps = 1
        if instance.prompts:
            tokens = min(model.step_tokens, sum(one.prompt_left for one in instance.prompts))
            each_ms += tokens * model.prompt_token_ms * model.mid
        else:
            steps = instance.ends[0][0] - instance.step
        instance.began_ms, instance.each_ms = now_ms, each_ms
        instance.until_ms = now_ms + steps * each_ms
        self._foresee(instance)

    def _foresee(self, instance: _Instance) -> None:
        instance.version += 1
        self._order += 1
        event = (instance.until_ms, self._order, instance.version, instance)
        heappush(self._events, event)

    def _steps_over(self, instance: _Instance, now_ms: float) -> None:
        rows = instance.rows
        self.row_ms += (rows - len(instance.joining)) * (now_ms - instance.began_ms)
        instance.step += max(1, round((now_ms - instance.began_ms) / instance.each_ms))
        left = self._model.step_tokens
        while instance.prompts and left:
            first = instance.prompts[0]
            taken = min(left, first.prompt_left)
            first.prompt_left -= taken
            left -= taken
            if not first.prompt_left:  # the step that ends the prompt makes the first token
                instance.prompts.popleft()
                self._order += 1
                heappush(instance.ends, (instance.step + first.steps_left, self._order, first))
        while instance.ends and instance.ends[0][0] <= instance.step:
            self.totals_ms.append(now_ms - heappop(instance.ends)[2].came_ms)
        self._count(instance, rows)


def _simulate(
    model: StepModel, load: OfferedLoad, instances: int, rows: int, seed: int
) -> FleetEstimate:
    rng = random.Random(seed)
    now_ms, arrivals_ms = 0.0, []
    wanted = round(load.per_s * load.deadline_ms / 1000 * _DEADLINES)
    count = min(max(wanted, _MIN_REQUESTS), _MAX_REQUESTS)
    for _ in range(count):
        now_ms += rng.expovariate(load.per_s) * 1000
        arrivals_ms.append(now_ms)
    simulation = _Simulation(model, load, instances, rows)
    simulation.run(arrivals_ms)
    in_time = sum(total_ms <= load.deadline_ms for total_ms in simulation.totals_ms)
    return FleetEstimate(
        instances,
        rows,
        in_time / count,
        min(1.0, simulation.row_ms / (now_ms * instances * rows)),
        _p95(simulation.waits_ms),
        _p95(simulation.totals_ms),
    )


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))] if values else 0.0
