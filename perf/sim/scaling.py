"""``python -m perf.sim scaling``: instances and requests met over a day, by the scaling metric.

A day of 24 hours takes 40 minutes here. So all times of a scaler (those of
``docker/kubernetes/components/autoscaling``) and of an instance's start are divided by 36. Arrivals
and sizes come from a trace. The rate follows a daily curve; at night it is a fifth of its maximum.
``need`` scales by the gauge of needed instances (PF-7). ``queue`` scales by waiting requests, five
per instance, as in KEDA's examples. ``held`` scales by all requests in the service, with a target
of 80 % of an instance's slots.
"""

import argparse
import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from orchestrator.instances.needed import Need
from orchestrator.service import Orchestrator
from perf.load.trace import Manner
from perf.report.bundle import Figure
from perf.sim.arrivals import SimArrival, trace_arrivals
from perf.sim.replay.loop import VirtualClock
from perf.sim.replay.worker import WorkerSpec
from perf.sim.scenes import STEP_COST, UNBOUNDED, Engine, capacity_of, load_of
from perf.sim.simulate import MODEL, Driver, Fleet, SimRun, simulate
from perf.sim.study import Case
from protocol import Outcome
from worker.runner.synthetic import StepCost

DAY_S: Final = 2400.0
SQUEEZED: Final = 86_400.0 / DAY_S
START_S: Final = 180.0 / SQUEEZED
"""From the order until an instance serves."""
POLL_S: Final = 15.0 / SQUEEZED
MEAN_S: Final = 120.0 / SQUEEZED
UP_S, UP_BY = 120.0 / SQUEEZED, 2
CALM_S: Final = 900.0 / SQUEEZED
"""Least time for which fewer must have been enough."""
DOWN_S: Final = 300.0 / SQUEEZED
LEAST, MOST = 1, 8
PEAK: Final = 3.0
"""Highest rate, in capacities of an instance."""
WAITING_EACH: Final = 5.0
HELD_EACH: Final = 0.8
_COST: Final = StepCost(4 * STEP_COST.step_s, 4 * STEP_COST.row_s, 2e-3)
ENGINE: Final = Engine("day", Fleet(WorkerSpec(_COST, 4, kv_tokens=4096, min_start_s=0.1), 1))

Scale = Callable[["Scaled"], float]


class Scaled(Driver):
    """Submits arrivals, and orders instances by what ``scale`` says; ``size`` by time."""

    def __init__(
        self, scale: Scale, orchestrator: Orchestrator, clock: VirtualClock, states_deadline: bool
    ) -> None:
        super().__init__(orchestrator, clock, states_deadline)
        self.registry = orchestrator.registry
        self.need = Need(self.registry, orchestrator.queue, clock)
        orchestrator.on_ended.append(self.need.ended)
        self._scale = scale
        self._all = [instance.address for instance in self.registry]
        self._encoder = next(iter(self.registry)).encoder
        self._starting = 0
        self._read: deque[float] = deque(maxlen=max(1, round(MEAN_S / POLL_S)))
        self._wanted: deque[int] = deque(maxlen=round(CALM_S / POLL_S))
        self._up_at = self._down_at = -math.inf
        self.sizes: list[int] = []
        self.spawn(self._keep())

    @property
    def size(self) -> int:
        """Instances that serve or start, as their owner pays for them."""
        return sum(i.retiring_since is None for i in self.registry) + self._starting

    async def _keep(self) -> None:
        await asyncio.sleep(POLL_S)  # until all that are configured are there
        for address in self._all[LEAST:]:
            self.registry.retire(address)
        while True:
            for instance in list(self.registry):
                if instance.retiring_since is not None and self.registry.idle(instance.address):
                    await self.registry.remove(instance.address)
            self._look()
            self.sizes.append(len(list(self.registry)) + self._starting)
            await asyncio.sleep(POLL_S)

    def _look(self) -> None:
        now = self.clock.now()
        self._read.append(self._scale(self))
        mean = sum(self._read) / len(self._read)
        # Kubernetes leaves a tenth more or less alone.
        wanted = self.size if abs(mean / self.size - 1) <= 0.1 else math.ceil(mean)
        self._wanted.append(min(MOST, max(LEAST, wanted)))
        if wanted > self.size and now >= self._up_at + UP_S:
            self._up_at = now
            for _ in range(min(UP_BY, self._wanted[-1] - self.size)):
                self._starting += 1
                self.clock.call_at(now + START_S, self._started)
        elif max(self._wanted) < self.size and now >= self._down_at + DOWN_S:
            self._down_at = now
            serving = [i for i in self.registry if i.retiring_since is None]
            self.registry.retire(min(serving, key=lambda i: i.load).address)

    def _started(self) -> None:
        self._starting -= 1
        known = {i.address: i for i in self.registry}
        address = next(
            a for a in self._all if a not in known or known[a].retiring_since is not None
        )
        self.registry.add(address)
        self.registry.named(address).encoder = self._encoder


def _needed(driver: Scaled) -> float:
    return dict(driver.need.by_model()).get((MODEL,), 0.0)


def _waiting(driver: Scaled) -> float:
    return len(list(driver.orchestrator.queue.tasks())) / WAITING_EACH


def _held(driver: Scaled) -> float:
    running = sum(i.load for i in driver.registry)
    return (len(list(driver.orchestrator.queue.tasks())) + running) / (
        HELD_EACH * ENGINE.fleet.spec.slots
    )


SCALES: Final[dict[str, Scale]] = {"need": _needed, "queue": _waiting, "held": _held}


def day(trace: Path, per_s: float) -> list[SimArrival]:
    """Arrivals of a day whose highest rate is ``per_s``."""
    load = load_of(trace, "trace", Manner.PROPORTIONAL, ENGINE)
    found: list[SimArrival] = []
    for hour in range(24):
        rate = per_s * (0.6 - 0.4 * math.cos(2 * math.pi * hour / 24))
        arrivals = trace_arrivals(load, rate, DAY_S / 24, seed=hour)
        found += [replace(one, at_s=one.at_s + hour * DAY_S / 24) for one in arrivals]
    return found


def _figures(name: str, run: SimRun, sizes: list[int]) -> list[Figure]:
    """Met, missed and instances."""
    results, of, key = run.results, Figure.of, f"scaling.{name}"
    met = sum(one.met for one in results) / len(results)
    refused = sum(one.outcome is Outcome.REFUSED for one in results) / len(results)
    return [
        of(f"{key}.met", f"{name}: met", "", [met], better="higher"),
        of(f"{key}.missed", f"{name}: neither met nor refused", "", [1 - met - refused]),
        of(f"{key}.instances", f"{name}: instances, mean", "", [sum(sizes) / len(sizes)]),
        of(f"{key}.most", f"{name}: instances, most", "", [max(sizes)]),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="Azure's columns")
    parser.add_argument("--scales", nargs="+", choices=list(SCALES), default=list(SCALES))


def cases(args: argparse.Namespace) -> Iterator[Case]:
    arrivals = day(args.trace, PEAK * capacity_of(args.trace, ENGINE))
    fleet = replace(ENGINE.fleet, count=MOST)

    def scaled(name: str) -> list[Figure]:
        drivers: list[Scaled] = []

        def new_driver(*given: object) -> Scaled:
            drivers.append(Scaled(SCALES[name], *given))  # type: ignore[arg-type]
            return drivers[0]

        run = simulate(arrivals, fleet, UNBOUNDED, seed=1, new_driver=new_driver)
        return _figures(name, run, drivers[0].sizes)

    for name in args.scales:
        yield Case(name, f"a day scaled by {name}", partial(scaled, name))
