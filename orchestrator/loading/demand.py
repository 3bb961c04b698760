"""Loads models on demand: a request asks for a model that no instance serves yet.

Workers list the models that they can load (``ModelCard.loadable``): only they know their disk and
memory, and a restarted orchestrator needs no stored state. All requests for a model share one load.
A request that cannot wait for the load is refused before it begins (DL-7).
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import AttemptsInFlight
from orchestrator.errors import (
    DeadlineExceeded,
    DeadlineInfeasible,
    Draining,
    NotReady,
    QueueFull,
    TidegateError,
)
from orchestrator.fair_share import FairShares, is_over_share
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.loading.choice import LoadChoice, LoadPlace, choose_place
from orchestrator.loading.swaps import Swaps
from orchestrator.prediction.prediction import Prediction
from orchestrator.prediction.promises import RESUBMIT_MS
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import service_log
from orchestrator.telemetry.metrics import MetricRow
from orchestrator.telemetry.narration import ON_DEMAND, narrate
from protocol import Loadable

BYTES_PER_MS = 500_000.0
"""Usual loading speed of an unknown model, in bytes per ms after a fixed time."""
FASTEST_BYTES_PER_MS = 8_000_000.0
"""A speed that no disk or memory exceeds, in bytes per ms: no load is faster."""
FIXED_MS = 300.0
CERTAIN_SHARE = 0.7
"""Share of the shortest recent load time that a load certainly needs."""
RETRY_AFTER_S = 5.0
"""Seconds for which requests for a model are refused after its load failed."""
MAX_WAITING: Final = 256
"""Maximum number of requests that wait for loads; a tenant may hold three times the free places."""
MIN_RESIDENCY_S: Final = 10.0
"""Seconds that a loaded model with work stays, and between a tenant's replacements of others'."""
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model could not be loaded; no retry before ``until``."""

    reason: str
    until: float


class ModelDemand:
    """Makes instances load the models that requests ask for."""

    def __init__(
        self,
        registry: Registry,
        queue: TaskQueue[Task],
        in_flight: AttemptsInFlight,
        prediction: Prediction,
        swaps: Swaps,
        clock: Clock,
    ) -> None:
        self.is_enabled = True
        self.refuses = True
        """Whether requests that cannot wait for a load are refused."""
        self.loads: Counter[str] = Counter()
        self.refused = 0
        self.evictions = 0
        """Number of models that no instance serves any more because another model replaced them."""
        self._registry = registry
        self._queue = queue
        self._in_flight = in_flight
        self._forecaster = prediction.forecaster
        self._schedule = prediction.schedule
        self._swaps = swaps
        self._clock = clock
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._seeking: set[str] = set()
        """Models whose loads are looking for an instance."""
        self._waiters: Counter[tuple[str, str]] = Counter()
        """Number of waiting requests, by model and tenant."""
        self._shares = FairShares(lag_jobs=0.0)
        self._took_at: dict[str, float] = {}
        """When each tenant last had a model loaded that replaced one of others."""
        self._arriving: set[Task] = set()
        """Tasks whose prompts are being read, before they reach the queue."""
        self._needed_at: dict[str, dict[str, float]] = {}
        """When each tenant last asked for a model, by model; the latest tenant is last."""
        self._failed: dict[str, Failure] = {}
        self._promised: set[str] = set()
        """Models of tasks that an earlier process admitted and that are not in the queue yet."""

    @property
    def waiting(self) -> int:
        return self._waiters.total()

    def loadable(self) -> dict[str, Loadable]:
        if not self.is_enabled:
            return {}
        return {
            one.name: one
            for instance in self._registry
            if not instance.removed and (card := instance.card) is not None
            for one in card.loadable
        }

    def states(self) -> dict[str, str]:
        """The state of each model and adapter, by name: ``loaded``, ``loading`` or ``loadable``."""
        served = {
            name
            for i in self._registry
            if i.card is not None
            for name in (i.model, *(one.name for one in i.card.adapters))
        }
        states = dict.fromkeys(self.loadable(), "loadable")
        states |= dict.fromkeys(self._flights, "loading")
        return states | dict.fromkeys(served, "loaded")

    def must_load(self, model: str) -> bool:
        """Whether a request for ``model`` must wait until it is loaded."""
        return not self._is_served(model) and model in self.loadable()

    async def ensure(
        self, job: Job, due_at: float | None = None, prompt_tokens: Callable[[], int] = lambda: 0
    ) -> None:
        """Wait until the model of ``job`` is served; returns at once if no instance can load it.
        ``due_at``: when the request ends at the latest, in seconds of the clock. ``prompt_tokens``:
        approximate number, if known. Raises ``DeadlineInfeasible``, ``DeadlineExceeded``,
        ``NotReady`` or ``QueueFull``."""
        model = job.model
        due_at = job.deadline.at if due_at is None else due_at
        part = Part.FIRST_TOKEN if due_at < job.deadline.at else ""
        while not self._is_served(model):
            known = self.loadable().get(model)
            if known is None:
                return
            self._note_need(model, job.tenant)
            self._require_hope(known, due_at, job, prompt_tokens)
            await self._wait_for(model, job.tenant, due_at, part)

    def needs(self, task: Task) -> None:
        """Count the model of ``task`` as needed until ``queued`` or the task's end."""
        self._note_need(task.model, task.job.tenant)
        if task.ending is not None:  # a drain ended it first
            return
        self._arriving.add(task)
        task.on_end.append(self._arriving.discard)

    def queued(self, task: Task) -> None:
        """Record that ``task`` has reached the queue or runs, where it is counted."""
        self._arriving.discard(task)

    def want(self, model: str) -> None:
        """Load ``model``, if possible, for a task that waits elsewhere. Idempotent."""
        if model in self.loadable() and not self._is_served(model) and not self._has_failed(model):
            self._promised.add(model)
            self._flight(model)

    def upkeep(self) -> None:
        """Load models that were replaced while queued tasks wait for them."""
        loadable = self.loadable()
        if not loadable:
            return
        for model in {task.model for task in self._queue.tasks()}:
            if model in loadable and not self._is_served(model) and not self._has_failed(model):
                self._flight(model)

    def abandon(self) -> None:
        """End all waits, because the service is shutting down. Workers continue their swaps."""
        for flight in self._flights.values():
            flight.cancel()

    # ── one request ──────────────────────────────────────────────────────────────────────────

    def _is_served(self, model: str) -> bool:
        """Whether an instance has ``model``, up or down: placement waits until a down one returns.
        An instance that is out of use does not count if another one could load the model."""
        leaving = self._swaps.leaving()
        keepers = [
            i
            for i in self._registry
            if i.model == model
            and not (i.address in leaving and self._swaps.latest[i.address].model != model)
        ]
        if not keepers or not all(keeper.is_out_of_use for keeper in keepers):
            return bool(keepers)
        return not any(i.ready and i.can_load(model) for i in self._registry)

    def _has_failed(self, model: str) -> Failure | None:
        failure = self._failed.get(model)
        if failure is not None and self._clock.now() >= failure.until:
            del self._failed[model]
            return None
        return failure

    def _require_hope(
        self, known: Loadable, due_at: float, job: Job, prompt_tokens: Callable[[], int]
    ) -> None:
        """Raise the error for a request that cannot wait for ``known``."""
        now = self._clock.now()
        if (failure := self._has_failed(known.name)) is not None:
            raise NotReady(
                f"{known.name} could not be loaded: {failure.reason}",
                retry_after_ms=1000 * (failure.until - now),
            )
        left_ms = 1000 * (due_at - now)
        least_ms = self._least_ms(known)
        if self.refuses and least_ms >= left_ms:
            self.refused += 1
            load_ms = max(least_ms, self._predicted_ms(known))
            # Requests that wait for the same load run in parallel.
            rows = 1 + self._waiting_for()[known.name]
            own = self._forecaster.after_load(job, prompt_tokens(), rows)
            by_ms = load_ms + own.slow_ms + RESUBMIT_MS
            raise DeadlineInfeasible(
                f"{known.name} is not loaded: the load takes about {load_ms:.0f} ms and the request"
                f" {own.usual_ms:.0f} ms, but {max(0.0, left_ms):.0f} ms remain: retry with a"
                f" deadline {by_ms:.0f} ms from now",
                predicted_finish_ms=load_ms + own.usual_ms,
                earliest_feasible_unix_ms=math.ceil(1000 * self._clock.unix() + by_ms),
                binding_constraint="model_load",
            )
        held = sum(n for (_, tenant), n in self._waiters.items() if tenant == job.tenant)
        left = MAX_WAITING - self.waiting
        is_over = is_over_share(held, 1, left)
        if not left or is_over:
            count, whose = (held, " of this tenant") if is_over else (self.waiting, "")
            raise QueueFull(
                f"{count} requests{whose} already wait for models to be loaded",
                retry_after_ms=self._predicted_ms(known),
            )

    def _least_ms(self, known: Loadable) -> float:
        """Least ms to load ``known`` with the drain, minus the elapsed time of a running load."""
        least = self._swaps.least_load_ms(known.name)
        if least is None:
            least = known.load_ms or known.bytes / FASTEST_BYTES_PER_MS / CERTAIN_SHARE
        return max(0.0, CERTAIN_SHARE * least - self._passed_ms(known.name))

    def _passed_ms(self, model: str) -> float:
        now = self._clock.now()
        return max(
            (
                1000 * (now - swap.began_at)
                for swap in self._swaps.latest.values()
                if not swap.is_over and swap.model == model
            ),
            default=0.0,
        )

    def _load_ms(self, known: Loadable) -> float:
        usual = self._swaps.usual_load_ms(known.name) or known.load_ms
        return usual or FIXED_MS + known.bytes / BYTES_PER_MS

    def _predicted_ms(self, known: Loadable) -> float:
        if (passed_ms := self._passed_ms(known.name)) > 0:
            return max(0.0, self._load_ms(known) - passed_ms)
        choice = self._choose(known)
        place = choice.place
        if place is not None:
            return place.total_ms
        wait_ms = 1000 * choice.wait_s if choice.wait_s < math.inf else 0.0
        return self._load_ms(known) + wait_ms

    async def _wait_for(self, model: str, tenant: str, due_at: float, part: str) -> None:
        flight = self._flight(model)
        self._shares.joined(tenant)
        self._waiters[model, tenant] += 1
        try:
            async with asyncio.timeout(max(0.0, due_at - self._clock.now())):
                await asyncio.shield(flight)
        except NotReady as error:  # shared by all waiters: each gets its own error
            raise NotReady(error.message, retry_after_ms=error.retry_after_ms) from None
        except TimeoutError:
            late_s = self._clock.now() - due_at
            raise DeadlineExceeded.before("its model was loaded", late_s, part) from None
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if flight.cancelled() and not (asking is not None and asking.cancelling()):
                raise Draining("the service is shutting down; try again elsewhere") from None
            raise
        finally:
            self._waiters -= Counter([(model, tenant)])  # subtraction drops zero counts

    # ── one load ─────────────────────────────────────────────────────────────────────────────

    def _flight(self, model: str) -> "asyncio.Task[None]":
        flight = self._flights.get(model)
        if flight is None:
            flight = self._flights[model] = asyncio.create_task(
                self._load(model), name=f"load {model}"
            )
            flight.add_done_callback(lambda done: self._landed(model, done))
        return flight

    def _landed(self, model: str, flight: "asyncio.Task[None]") -> None:
        self._flights.pop(model, None)
        self._promised.discard(model)
        if not flight.cancelled():
            flight.exception()  # it may never be awaited

    async def _load(self, model: str) -> None:
        place = await self._found_place(model)
        if place is None:
            return
        address = place.address
        replaced = self._registry.instances[address].model
        narrate(service_log, ON_DEMAND, model, instance=address, model=model)
        try:
            await self._swaps.start(address, {"model_name": model}).wait()
        except TidegateError as error:
            self.loads["failed"] += 1
            self._failed[model] = Failure(error.message, self._clock.now() + RETRY_AFTER_S)
            raise NotReady(
                f"{model} could not be loaded: {error.message}",
                retry_after_ms=1000 * RETRY_AFTER_S,
            ) from None
        self.loads["done"] += 1
        self.evictions += bool(replaced) and not self._is_served(replaced)

    async def _found_place(self, model: str) -> LoadPlace | None:
        """Wait for an instance that can load ``model``; None if no load is needed any more. Of
        several models, that of the tenant with the least load time so far goes first."""
        self._seeking.add(model)
        try:
            while True:
                known = self.loadable().get(model)
                is_wanted = self._asking(model) or model in self._promised
                if known is None or self._is_served(model) or not is_wanted:
                    return None
                choice = self._choose(known)
                if choice.place is not None and self._is_next(model):
                    self._charge(self._asking(model), choice.place)
                    return choice.place
                await asyncio.sleep(min(choice.wait_s or _LOOK_S, _LOOK_S))
        finally:
            self._seeking.discard(model)

    def _is_next(self, model: str) -> bool:
        had_ms = self._had_ms(model)
        sooner = (other for other in self._seeking if self._had_ms(other) < had_ms)
        known = (self.loadable().get(other) for other in sooner)
        return not any(one is not None and self._choose(one).place for one in known)

    def _had_ms(self, model: str) -> float:
        return min(map(self._shares.of, self._asking(model)), default=0.0)

    def _charge(self, tenants: Collection[str], place: LoadPlace) -> None:
        """Charge a load, and the replacement of others' model, to the requesting tenants."""
        now = self._clock.now()
        for tenant in tenants:
            self._shares.served(tenant, place.load_ms / len(tenants))
            if place.is_others:
                self._took_at[tenant] = now
        past = [t for t, took_at in self._took_at.items() if now - took_at >= MIN_RESIDENCY_S]
        for tenant in past:
            del self._took_at[tenant]

    def _asking(self, model: str) -> set[str]:
        """Tenants whose requests wait for ``model``."""
        queued = {task.job.tenant for task in self._queue.tasks() if task.model == model}
        return queued | {tenant for wanted, tenant in self._waiters if wanted == model}

    def _waiting_for(self) -> Counter[str]:
        """Number of requests that wait for loads, by model."""
        waiting: Counter[str] = Counter()
        for (model, _), count in self._waiters.items():
            waiting[model] += count
        return waiting

    def _note_need(self, model: str, tenant: str) -> None:
        needed, now = self._needed_at.setdefault(model, {}), self._clock.now()
        needed.pop(tenant, None)
        needed[tenant] = now
        while needed[first := next(iter(needed))] < now - MIN_RESIDENCY_S:
            del needed[first]

    def _choose(self, known: Loadable) -> LoadChoice:
        now, asking = self._clock.now(), self._asking(known.name)
        took_at = [self._took_at.get(tenant, -math.inf) for tenant in asking]
        turn_in_s = min(took_at, default=-math.inf) + MIN_RESIDENCY_S - now
        return choose_place(self._places(known, asking), MIN_RESIDENCY_S, turn_in_s)

    def _places(self, known: Loadable, asking: Collection[str]) -> list[LoadPlace]:
        leaving, now = self._swaps.leaving(), self._clock.now()
        waiting = Counter(task.model for task in self._queue.tasks())
        waiting.update(self._waiting_for())
        waiting.update(task.model for task in self._arriving)
        served = Counter(i.model for i in self._registry if i.ready and i.address not in leaving)
        places = []
        for instance in self._registry:
            is_free = instance.ready and not instance.is_swapping
            if not is_free or instance.address in leaving or not instance.can_load(known.name):
                continue
            model = instance.model
            needed_at, is_spare = self._needed_at.get(model, {}), served[model] > 1
            lately = {t for t, at in needed_at.items() if now - at < MIN_RESIDENCY_S}
            places.append(
                LoadPlace(
                    address=instance.address,
                    load_ms=self._load_ms(known),
                    is_spare=is_spare,
                    running=instance.lane_load,
                    waiting=waiting[model],
                    drain_ms=self._drain_ms(instance),
                    resident_s=now - instance.serves_since,
                    unneeded_s=now - max(needed_at.values(), default=-1e6),
                    is_others=not is_spare and not lately.issubset(asking),
                )
            )
        return places

    def _drain_ms(self, instance: Instance) -> float:
        """Predicted ms until the last of the instance's jobs ends."""
        jobs = (each for each in self._in_flight if each.address == instance.address)
        return max((self._schedule.left_ms(each.task) for each in jobs), default=0.0)


DEMAND: tuple[MetricRow[ModelDemand], ...] = (
    MetricRow(
        "counter",
        "model_loads",
        "loads",
        "Models loaded because a request asked for a model that no instance served",
        lambda of: [((result,), of.loads[result]) for result in ("done", "failed")],
        ("result",),
    ),
    MetricRow(
        "counter",
        "model_evictions",
        "models",
        "Models that no instance serves any more because a requested model replaced them",
        lambda of: of.evictions,
    ),
    MetricRow(
        "counter",
        "model_load_refused",
        "requests",
        "Requests refused because their model could not be loaded by their deadline (DL-7)",
        lambda of: of.refused,
    ),
)
