"""``python -m perf.sim.fullest --trace FILE``: requests met where each goes to the fullest instance
that still keeps its deadline (PolyServe), beside the one that finishes it first."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.instances.candidate import Candidate
from orchestrator.placement import placer
from orchestrator.placement.choose import finish_ms, place
from orchestrator.placement.placer import Choice, Placer
from orchestrator.placement.requirements import Demand
from orchestrator.tasks.task import Task
from perf.load.trace import Manner
from perf.sim.scenes import SLOW, UNBOUNDED, Engine, Traced, capacity_of
from perf.sim.simulate import simulate

_WARM_S = 8.0
_first, _choose = place, Placer.choose
_left_ms = 0.0


def _chosen(self: Placer, task: Task) -> Choice | None:
    global _left_ms
    _left_ms = task.deadline.left_ms(self._clock.now())
    return _choose(self, task)


def _fullest(
    demand: Demand, able: Sequence[Candidate], cached: Mapping[str, int]
) -> Candidate | None:
    free = [one for one in able if one.has_room]
    if any(one.step is None for one in free):
        return _first(demand, able, cached)
    keep = [one for one in free if finish_ms(demand, one, cached) <= _left_ms]
    most = max(keep, key=lambda one: (one.load / one.limit, one.name), default=None)
    return most or _first(demand, able, cached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 1.5, 2.0])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    engine = Engine("slow", replace(SLOW.fleet, count=args.instances))
    capacity = capacity_of(args.trace, SLOW) * args.instances / SLOW.fleet.count
    Placer.choose = _chosen  # type: ignore[method-assign]
    for manner in (Manner.PROPORTIONAL, Manner.PARTS):
        for load in args.loads:
            source = Traced(args.trace, "trace", manner, load, capacity, engine.speed)
            for name, chosen in (("first", _first), ("fullest", _fullest)):
                vars(placer)["place"] = chosen
                met = []
                for seed in range(args.seeds):
                    arrivals = source.arrivals(args.seconds + _WARM_S, seed)
                    run = simulate(arrivals, engine.fleet, UNBOUNDED, seed=seed, linger_s=20.0)
                    counted = [one for one in run.results if one.arrival.at_s >= _WARM_S]
                    met.append(sum(one.met for one in counted) / len(counted))
                told = " ".join(f"{share:.4f}" for share in met)
                print(f"{manner} {load:g}x {name}: {told}", flush=True)


if __name__ == "__main__":
    main()
