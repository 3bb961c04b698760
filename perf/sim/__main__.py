"""``make sim``: hours of load in virtual time. See the package.

    python -m perf.sim                       a few cells, every policy
    python -m perf.sim --cells all --seeds 1 --only ours
    python -m perf.sim --trace FILE --loads 1 2 3 --plot STEM
    python -m perf.sim STUDY [--loads …] [--seconds …] [--seeds …]

Without a study, it compares our policies and others' cell by cell: with ``--cells`` on random
cells, with ``--trace`` on the requests of a real service.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from perf.load.trace import Manner, TraceError
from perf.report.command import begin, new_console, new_parser
from perf.report.recording import Recording
from perf.sim import counterfactual, crowds, quotes, reported, runs
from perf.sim.campaign import LABELS, ROWS, run_campaign
from perf.sim.campaign_report import draw, save, show
from perf.sim.scenes import ENGINES, QUICK, SLOW, SimScene, drawn_scenes, trace_scenes
from perf.sim.scenes import FLEET as FLEET  # scripts of others import it from here
from perf.sim.study import run_cases

STUDIES = {
    "runs": runs,
    "quotes": quotes,
    "reported": reported,
    "refusals": counterfactual,
    "crowds": crowds,
}
"""Studies by name: of runs of calls under one deadline (DL-22), quotes (DL-21), what clients are
told (DL-16), wrong refusals (DL-17), crowds (DL-7, DL-15)."""


def on_study(name: str, given: Sequence[str]) -> int:
    """Run a study: print its cases as they come, then save them."""
    study = STUDIES[name]
    parser = new_parser(study.__doc__)
    parser.add_argument("--loads", type=float, nargs="+", metavar="TIMES", help="the capacity")
    parser.add_argument("--seconds", type=float, metavar="S", help="of load in each case")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    study.add_options(parser)
    args = parser.parse_args(given)
    recording = begin(parser, args, "perf.sim", name, *given, seed=1)
    results = run_cases(study.cases(args), new_console(130))
    recording.save(recording.bundle(results))
    return int(any(one.failed for one in results))


def on_campaign(args: argparse.Namespace, recording: Recording, console: Console) -> int:
    """Run the campaign and print it: a row per cell as it comes, then all of them together."""
    begun = time.monotonic()
    try:
        scenes = scenes_of(args)
    except TraceError as error:
        console.print(f"{error}", style="red")
        return 2
    cells = []
    for cell in run_campaign(
        scenes,
        only=args.only or list(LABELS),
        rows=args.rows,
        seeds=range(args.seed, args.seed + args.seeds),
        seconds=60 * args.minutes,
        processes=args.processes,
    ):
        cells.append(cell)
        told = f"{cell.scene}: {cell.policy.label} {cell.median('goodput'):.2f} met/s"
        console.print(told, style="dim")
    show(cells, console)
    seconds = round(time.monotonic() - begun, 1)
    console.print(f"{seconds} s", style="dim")
    save(cells, seconds, recording)
    if args.plot:
        draw(cells, args.plot)
    return 0


def scenes_of(args: argparse.Namespace) -> list[SimScene]:
    """Cells that the options ask for. Raises ``TraceError``."""
    scenes = [
        scene
        for trace in args.trace
        for engine in args.engines
        for scene in trace_scenes(
            trace, ENGINES[engine], arrivals=args.arrivals, manners=args.deadlines, loads=args.loads
        )
    ]
    if args.cells is None and args.trace:
        return scenes
    drawn = drawn_scenes()
    if not args.cells:
        drawn = [s for s in drawn if s.name in QUICK and s.engine.slots == max(ROWS)]
    elif args.cells != ["all"]:
        drawn = [s for s in drawn if {s.key, s.name} & set(args.cells)]
    return drawn + scenes


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(f"{__doc__}\nStudies: {', '.join(STUDIES)}; each has --help.")
    add = parser.add_argument
    add("--minutes", type=float, default=1 / 3, help="of load per row")
    add("--loads", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0, 3.0], help="of traces")
    add("--only", nargs="+", metavar="POLICY", help="run these, also as ours@16")
    add("--seed", type=int, default=20240229)
    add("--seeds", type=int, default=5)
    add("--cells", nargs="*", metavar="CELL", help="drawn cells, by name or key, or all")
    add("--trace", type=Path, nargs="+", default=[], help="Azure's columns")
    add("--engines", nargs="+", choices=list(ENGINES), default=[SLOW.name], help="of traces")
    add("--rows", type=int, nargs="*", default=list(ROWS), help="fixed numbers of rows, too")
    add("--arrivals", nargs="+", choices=("poisson", "trace"), default=["poisson", "trace"])
    add("--deadlines", type=Manner, nargs="+", choices=list(Manner), default=list(Manner))
    add("--processes", type=int, default=os.cpu_count() or 1)
    add("--plot", type=Path, metavar="STEM", help="draw STEM.png")
    return parser


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in STUDIES:
        return on_study(sys.argv[1], sys.argv[2:])
    parser = new_arguments()
    args = parser.parse_args()
    names = {name for scene in drawn_scenes() for name in (scene.key, scene.name)}
    for name in args.cells or ():
        if name not in names | {"all"}:
            parser.error(f"there is no cell {name!r}; available: all, {', '.join(sorted(names))}")
    for name in args.only or ():
        if name.partition("@")[0] not in LABELS:
            parser.error(f"there is no policy {name!r} here; available: {', '.join(LABELS)}")
    return on_campaign(args, begin(parser, args, "perf.sim", *sys.argv[1:]), new_console(150))


if __name__ == "__main__":
    sys.exit(main())
