"""Several orchestrators in front of the same instances, with a view that is a moment old (OR-18).

Requests of mixed lengths come to one orchestrator after the other, or three times as many to the
first as to another. ``shares``: they divide each instance's slots, as they do over a store
(``sharing``); ``free``: each counts on whatever looks free. ``one``: one orchestrator gets all.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from perf.report.bundle import Figure
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.scenes import FLEET, SPEED, UNBOUNDED, capacity_per_s
from perf.sim.simulate import Fleet, SimRun, simulate
from perf.sim.study import Case

WAYS = ("free", "shares", "one")
SKEW = 3
"""How many times the share of another orchestrator the first one gets of an uneven balancer."""
WARM_S = 5.0
_SCENARIO = Scenario(SPEED, open_share=1.0)


def fleet_of(way: str, members: int, instances: int) -> Fleet:
    """Instances, and the orchestrators in front of them."""
    return replace(
        FLEET,
        count=instances,
        orchestrators=1 if way == "one" else members,
        shares_slots=way == "shares",
    )


def run_fleet(
    fleet: Fleet, load: float, seconds: float, seed: int, *, is_uneven: bool = False
) -> SimRun:
    """Simulate ``load`` times what the instances can do."""
    rng = random.Random(f"{seed} doors")
    doors = range(fleet.orchestrators)
    weights = [SKEW if is_uneven and door == 0 else 1 for door in doors]
    per_s = load * capacity_per_s(_SCENARIO, FLEET, 1) * fleet.count / FLEET.count
    arrivals: list[SimArrival] = []
    for number, arrival in enumerate(_SCENARIO.arrivals(per_s, seconds + WARM_S, seed)):
        door = rng.choices(doors, weights)[0] if is_uneven else number % len(doors)
        arrivals.append(replace(arrival, door=door))
    return simulate(arrivals, fleet, UNBOUNDED, seed=seed)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--members", type=int, default=4, help="orchestrators")
    parser.add_argument("--instances", type=int, default=8)
    parser.set_defaults(loads=[0.9, 2.0], seeds=1)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """A case for each load, balancer and way."""
    for load, is_uneven, way in itertools.product(args.loads, (False, True), args.ways):
        fleet = fleet_of(way, args.members, args.instances)
        doors = "uneven" if is_uneven else "even"
        key = f"fleet.{load:g}x.{doors}.{way}"
        what = f"{fleet.orchestrators} before {args.instances}, {way}, {doors} doors, load {load:g}"
        run = partial(run_fleet, fleet, load, args.seconds or 8.0, is_uneven=is_uneven)
        yield Case(key, what, partial(_measured, key, run, args.seeds))


def _measured(key: str, run: Callable[[int], SimRun], seeds: int) -> list[Figure]:
    return figures_of(key, [run(seed) for seed in range(1, seeds + 1)])


def figures_of(key: str, runs: list[SimRun]) -> list[Figure]:
    """Figures of what came after the warm-up, a sample for each run."""
    met, first = [], []
    for run in runs:
        counted = [result for result in run.results if result.arrival.at_s >= WARM_S]
        at_first = [result.met for result in counted if result.arrival.door == 0]
        met.append(sum(result.met for result in counted) / len(counted))
        first.append(sum(at_first) / len(at_first))
    return [
        Figure.of(f"{key}.met", "deadlines kept", "", met, better="higher"),
        Figure.of(f"{key}.first_door", "at the first orchestrator", "", first, better="higher"),
    ]
