"""``make sim``: policies compared over hours of load, in virtual time. See the package.

With ``--trace`` requests are those of a real service, and others' schedulers run beside ours; else
they are drawn, and settings of our own are compared.
"""

import argparse
import os
import sys
import time
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
from perf.sim.campaign import KNOWN, LABELS, SLOTS, STEP_COST, run_campaign
from perf.sim.campaign_report import save, show
from perf.sim.simulate import Fleet, SimRun, simulate
from perf.sim.summary import Summary
from perf.sim.worker import WorkerSpec

FLEET = Fleet(WorkerSpec(STEP_COST, SLOTS, kv_tokens=SLOTS * 512))
SPEED = Speed(
    1000 * STEP_COST.prompt_token_s, 1000 * (STEP_COST.step_s + STEP_COST.row_s * SLOTS / 2)
)
WARM_S = 20.0
UNBOUNDED = {"QUEUE_SIZE": "-1"}


def run_policy(
    policy: Policy, scenario: Scenario, fleet: Fleet, per_s: float, seconds: float, seed: int
) -> SimRun:
    """One policy under one load."""
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
        UNBOUNDED | {"QUEUE_ORDER": "fifo", "ADMISSION": "off"},
        seed=seed,
        states_deadline=False,
        linger_s=600.0,
    )
    ends = sorted(result.ended_s for result in run.results)
    return 0.7 * len(ends) / (percentile(ends, 85) - percentile(ends, 15))


def on_traces(args: argparse.Namespace, recording: Recording, console: Console) -> int:
    """The campaign: a row per cell as it comes, then what it comes to."""
    policies = args.only or [name for name in LABELS if args.lengths == "open" or name == KNOWN]
    begun, cells = time.monotonic(), []
    try:
        for cell in run_campaign(
            args.trace,
            arrivals=args.arrivals,
            manners=args.deadlines,
            loads=args.loads,
            policies=policies,
            seeds=range(args.seed, args.seed + args.seeds),
            seconds=60 * args.minutes,
            processes=args.processes,
        ):
            cells.append(cell)
            console.print(
                f"{cell.trace} {cell.arrivals} {cell.manner} {cell.load:g} × {cell.label}: "
                f"{cell.goodput:.2f} met/s ({cell.low:.2f} … {cell.high:.2f}), "
                f"attainment {100 * cell.attainment:.1f} %, waste {100 * cell.waste:.1f} %",
                style="dim",
            )
    except TraceError as error:
        console.print(f"{error}", style="red")
        return 2
    show(cells, console)
    save(cells, round(time.monotonic() - begun, 1), recording)
    if args.plot:
        for path in plot.draw(cells, args.plot):
            console.print(f"wrote {path}")
    return 0


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="of load per row")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--open", type=float, default=1.0, help="share of open-ended answers")
    parser.add_argument("--burst", type=float, default=1.0, help="1: Poisson; up to 2: bursts")
    parser.add_argument("--only", nargs="+", metavar="POLICY")
    parser.add_argument("--seed", type=int, default=20240229)
    traces = parser.add_argument_group("on traces")
    traces.add_argument("--trace", type=Path, nargs="+", default=[], help="Azure's columns")
    traces.add_argument(
        "--arrivals", nargs="+", choices=("poisson", "trace"), default=["poisson", "trace"]
    )
    traces.add_argument(
        "--deadlines", type=Manner, nargs="+", choices=list(Manner), default=list(Manner)
    )
    traces.add_argument("--lengths", choices=("open", "known"), default="open")
    traces.add_argument("--seeds", type=int, default=5)
    traces.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    traces.add_argument("--plot", type=Path, metavar="STEM", help="draw STEM.png and STEM.svg")
    args = parser.parse_args()
    known = list(LABELS) if args.trace else [p.name for p in POLICIES]
    for name in args.only or ():
        if name not in known:
            parser.error(f"there is no policy {name!r} here; there is: {', '.join(known)}")
    console = new_console(130)
    if args.trace:
        return on_traces(args, begin(parser, args, "perf.sim", *sys.argv[1:]), console)
    scenario = Scenario(SPEED, open_share=args.open, burst=args.burst)
    capacity = capacity_per_s(scenario, FLEET, args.seed)
    title = f"{args.minutes:g} min a row, capacity {capacity:.1f}/s, seed {args.seed}"
    table = Table(title=title, title_justify="left")
    columns = "load,policy,goodput/s,attainment,waste,TTFT p50 ms,p99 ms,refused,false,samples"
    for column in columns.split(","):
        table.add_column(column, justify="left" if column == "policy" else "right")
    begun, hours = time.perf_counter(), 0.0
    for load in args.loads:
        for policy in POLICIES:
            if args.only and policy.name not in args.only:
                continue
            seconds = 60 * args.minutes
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
