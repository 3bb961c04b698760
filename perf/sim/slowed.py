"""``python -m perf.sim.slowed``: one of four instances becomes slow, again and again.

It takes four times as long for everything for four of every twelve seconds, as where others use its
machine. What runs there is late unless it goes on elsewhere (``dispatch.rescue``); beside that the
same without, in virtual time, with the same requests.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, result
from perf.sim.__main__ import SPEED, UNBOUNDED, capacity_per_s
from perf.sim.arrivals import Scenario
from perf.sim.scenes import STEP_COST
from perf.sim.simulate import Fleet, SimRun, WorkerEvent, simulate
from replay.worker import SimWorker, WorkerSpec

INSTANCES, SLOTS = 4, 8
TIMES: Final = 4.0
EVERY_S, FOR_S, WARM_S = 12.0, 4.0, 6.0
LOADS: Final = (0.7, 1.0, 1.3)
FLEET: Final = Fleet(WorkerSpec(STEP_COST, SLOTS, kv_tokens=SLOTS * 512), INSTANCES)
SCENARIO: Final = Scenario(SPEED, open_share=1.0)


def events(seconds: float) -> Mapping[float, WorkerEvent]:
    """When the first instance becomes slow, and when it is well again."""
    slow = replace(
        STEP_COST,
        step_s=TIMES * STEP_COST.step_s,
        row_s=TIMES * STEP_COST.row_s,
        prompt_token_s=TIMES * STEP_COST.prompt_token_s,
    )

    def at(cost: object) -> WorkerEvent:
        def set_cost(workers: list[SimWorker]) -> None:
            workers[0].runner.cost = cost  # type: ignore[assignment]

        return set_cost

    found: dict[float, WorkerEvent] = {}
    for number in range(math.ceil(seconds / EVERY_S)):
        found[WARM_S + number * EVERY_S] = at(slow)
        found[WARM_S + number * EVERY_S + FOR_S] = at(STEP_COST)
    return found


def run_once(per_s: float, seconds: float, seed: int, *, moves: bool) -> SimRun:
    """One run, with jobs moved away from the slow instance or not."""
    return simulate(
        SCENARIO.arrivals(per_s, seconds, seed),
        FLEET,
        UNBOUNDED | {"DISPATCH__MOVE_LATE": str(moves)},
        seed=seed,
        events=events(seconds),
    )


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS, metavar="TIMES")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    args = parser.parse_args(argv)
    recording, console = begin(parser, args, "perf.sim.slowed", *argv), new_console()
    capacity = capacity_per_s(SCENARIO, FLEET, 1)
    results: list[BenchResult] = []
    for load in args.loads:
        with result(results, f"slowed-{load:g}x", f"one slow instance, {load:g}x") as figures:
            for moves in (True, False):
                runs = [
                    run_once(load * capacity, args.seconds, seed, moves=moves)
                    for seed in range(1, args.seeds + 1)
                ]
                name = "moved" if moves else "left"
                met = [sum(one.met for one in run.results) / len(run.results) for run in runs]
                key, label = f"{load:g}x.{name}.met", f"met at {load:g}x, jobs are {name}"
                figures.append(Figure.of(key, label, "", met, better="higher"))
                if moves:
                    moved = [
                        run.orchestrator.metrics.registry.get_sample_value(
                            "tidegate_retries_total", {"kind": "move"}
                        )
                        for run in runs
                    ]
                    counts = [float(count or 0.0) for count in moved]
                    key = f"{load:g}x.moves"
                    figures.append(Figure.of(key, "jobs moved", "", counts, better="neither"))
            for one in figures:
                console.print(f"{one.label}: {one.median:.3f} ({one.low:.3f} … {one.high:.3f})")
    recording.save(recording.bundle(results))
    return 1 if any(one.failed for one in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
