"""``make sim``: policies compared over hours of load, in virtual time. See the package.

A campaign compares ours, as it is and with fixed numbers of rows, with others' schedulers: with
``--cells`` on drawn cells, with ``--trace`` on the requests of a real service. Without either,
requests are drawn and settings of our own compared.

    python -m perf.sim --cells --seeds 1 --runs build/sim-runs.json
    python -m perf.sim --cells --seeds 1 --runs build/sim-runs.json --only ours

The first runs every policy in the cells of a quick look, the second ours again beside the others.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perf.goodput.policies import POLICIES, Policy
from perf.load.trace import Manner, TraceError
from perf.load.workload import Speed
from perf.report.command import begin, new_console, new_parser
from perf.report.recording import Recording
from perf.report.stats import percentile
from perf.sim import plot
from perf.sim.arrivals import Scenario
from perf.sim.campaign import KNOWN, LABELS, ROWS, SavedRuns, SimCell, run_campaign
from perf.sim.campaign_report import save, show
from perf.sim.replay.worker import WorkerSpec
from perf.sim.scenes import (
    ENGINES,
    QUICK,
    SLOW,
    STEP_COST,
    SimScene,
    Traced,
    drawn_scenes,
    trace_scenes,
)
from perf.sim.simulate import Fleet, SimRun, simulate
from perf.sim.summary import Summary

SLOTS = SLOW.slots
FLEET = Fleet(WorkerSpec(STEP_COST, SLOTS, kv_tokens=SLOTS * 512))
SPEED = Speed(
    1000 * STEP_COST.prompt_token_s, 1000 * (STEP_COST.step_s + STEP_COST.row_s * SLOTS / 2)
)
WARM_S = 20.0
UNBOUNDED = {"QUEUE__MAX_WAITING": "-1"}


def run_policy(
    policy: Policy, scenario: Scenario, fleet: Fleet, per_s: float, seconds: float, seed: int
) -> SimRun:
    """Simulate one policy under one load."""
    return simulate(
        scenario.arrivals(per_s, seconds, seed),
        fleet,
        UNBOUNDED | dict(policy.settings),
        seed=seed,
        states_deadline=policy.states_deadline,
    )


def capacity_per_s(scenario: Scenario, fleet: Fleet, seed: int) -> float:
    """Requests per second with every slot full: the middle of a flood without deadlines."""
    flood = [arrival for arrival in scenario.arrivals(1000.0, 0.6, seed)]
    run = simulate(
        flood,
        fleet,
        UNBOUNDED | {"QUEUE__ORDER": "fifo", "ADMISSION__MODE": "off"},
        seed=seed,
        states_deadline=False,
        linger_s=600.0,
    )
    ends = sorted(result.ended_s for result in run.results)
    return 0.7 * len(ends) / (percentile(ends, 85) - percentile(ends, 15))


def on_campaign(args: argparse.Namespace, recording: Recording, console: Console) -> int:
    """Run the campaign and print it: a row per cell as it comes, then all of them together."""
    begun = time.monotonic()
    names = [name for name in LABELS if args.lengths == "open" or name == KNOWN]
    try:
        scenes = scenes_of(args)
    except TraceError as error:
        console.print(f"{error}", style="red")
        return 2
    cells = []
    for cell in run_campaign(
        scenes,
        only=args.only or names,
        rows=args.rows,
        seeds=range(args.seed, args.seed + args.seeds),
        seconds=60 * (args.minutes or 1 / 3),
        processes=args.processes,
        saved=SavedRuns(args.runs),
    ):
        cells.append(cell)
        console.print(
            f"{cell.scene}: {cell.policy.label} {cell.median('goodput'):.2f} met/s", style="dim"
        )
    show(cells, console, every=args.every)
    seconds = round(time.monotonic() - begun, 1)
    console.print(f"{seconds} s", style="dim")
    save(cells, seconds, recording)
    if args.plot:
        for path in plot.draw(points_of(cells), args.plot):
            console.print(f"wrote {path}")
    return 0


def scenes_of(args: argparse.Namespace) -> list[SimScene]:
    """Cells that the options ask for. Raises ``TraceError``."""
    engines = [ENGINES[name] for name in args.engines]
    scenes = [
        scene
        for trace in args.trace
        for engine in engines
        for scene in trace_scenes(
            trace, engine, arrivals=args.arrivals, manners=args.deadlines, loads=args.loads
        )
    ]
    if args.cells is None:
        return scenes
    drawn = drawn_scenes()
    if not args.cells:
        drawn = [s for s in drawn if s.name in QUICK and s.engine.slots == max(ROWS)]
    elif args.cells != ["all"]:
        drawn = [s for s in drawn if {s.key, s.name} & set(args.cells)]
    return drawn + scenes


def points_of(cells: Sequence[SimCell]) -> list[plot.PlotPoint]:
    """Points of the cells on traces for the plot, each policy without a fixed number of rows."""
    return [
        plot.PlotPoint(
            trace=cell.scene.name.split(".")[0],
            arrivals=cell.scene.source.arrivals_by,
            manner=cell.scene.source.manner,
            load=cell.scene.source.load,
            policy=cell.policy.name,
            label=cell.policy.label,
            goodput=cell.median("goodput"),
            low=min(cell.values("goodput")),
            high=max(cell.values("goodput")),
            capacity=cell.scene.source.capacity,
        )
        for cell in cells
        if isinstance(cell.scene.source, Traced) and cell.policy.rows is None
    ]


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, help="of load per row: 3, or in a campaign a third of one"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--open", type=float, default=1.0, help="share of open-ended answers")
    parser.add_argument("--burst", type=float, default=1.0, help="1: Poisson; up to 2: bursts")
    parser.add_argument(
        "--only", nargs="+", metavar="POLICY", help="run these; in a campaign also ours@16"
    )
    parser.add_argument("--seed", type=int, default=20240229)
    campaign = parser.add_argument_group("campaign")
    campaign.add_argument(
        "--cells",
        nargs="*",
        metavar="CELL",
        help="drawn cells, by name or key: all, or without one a quick choice",
    )
    campaign.add_argument("--trace", type=Path, nargs="+", default=[], help="Azure's columns")
    campaign.add_argument(
        "--engines",
        nargs="+",
        choices=list(ENGINES),
        default=[SLOW.name],
        help="for traces: slow, twice eight slots, or a demo engine by its slots",
    )
    campaign.add_argument(
        "--rows", type=int, nargs="*", default=list(ROWS), help="fixed numbers, beside ours"
    )
    campaign.add_argument(
        "--arrivals", nargs="+", choices=("poisson", "trace"), default=["poisson", "trace"]
    )
    campaign.add_argument(
        "--deadlines", type=Manner, nargs="+", choices=list(Manner), default=list(Manner)
    )
    campaign.add_argument("--lengths", choices=("open", "known"), default="open")
    campaign.add_argument("--seeds", type=int, default=5)
    campaign.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    campaign.add_argument(
        "--runs",
        type=Path,
        metavar="FILE",
        help="keep every run there; with --only the others are taken from it",
    )
    campaign.add_argument("--every", action="store_true", help="a row for each policy too")
    campaign.add_argument("--plot", type=Path, metavar="STEM", help="draw STEM.png and STEM.svg")
    return parser


def main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    is_campaign = bool(args.trace) or args.cells is not None
    known = list(LABELS) if is_campaign else [p.name for p in POLICIES]
    names = {name for scene in drawn_scenes() for name in (scene.key, scene.name)}
    for name in args.cells or ():
        if name not in names | {"all"}:
            parser.error(f"there is no cell {name!r}; available: all, {', '.join(sorted(names))}")
    for name in args.only or ():
        if name.partition("@")[0] not in known:
            parser.error(f"there is no policy {name!r} here; available: {', '.join(known)}")
    console = new_console(150)
    if is_campaign:
        return on_campaign(args, begin(parser, args, "perf.sim", *sys.argv[1:]), console)
    minutes = args.minutes or 3.0
    scenario = Scenario(SPEED, open_share=args.open, burst=args.burst)
    capacity = capacity_per_s(scenario, FLEET, args.seed)
    title = f"{minutes:g} min a row, capacity {capacity:.1f}/s, seed {args.seed}"
    table = Table(title=title, title_justify="left")
    columns = "load,policy,goodput/s,attainment,waste,TTFT p50 ms,p99 ms,refused,false,samples"
    for column in columns.split(","):
        table.add_column(column, justify="left" if column == "policy" else "right")
    begun, hours = time.perf_counter(), 0.0
    for load in args.loads:
        for policy in POLICIES:
            if args.only and policy.name not in args.only:
                continue
            seconds = 60 * minutes
            run = run_policy(policy, scenario, FLEET, load * capacity, seconds, args.seed)
            hours += seconds / 3600
            s = Summary.of(run, WARM_S)
            table.add_row(
                f"{load:g}",
                policy.label,
                f"{s.goodput:.2f}",
                f"{100 * s.attainment:.1f} %",
                f"{100 * s.waste:.2f} %",
                f"{s.ttft_p50_ms:.0f}",
                f"{s.ttft_p99_ms:.0f}",
                f"{100 * s.refused:.1f} %",
                f"{100 * s.false_refusals:.2f} %",
                f"{s.samples}",
            )
        table.add_section()
    console.print(table)
    taken = time.perf_counter() - begun
    console.print(f"{hours:.2f} h simulated in {taken:.0f} s", style="dim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
