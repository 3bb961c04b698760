"""Ways to share instances, beside each other. See the package."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as changed
from rich.console import Console
from rich.table import Table

from perf.load.trace import TraceError
from perf.report.bundle import BenchResult
from perf.report.command import begin, new_console, new_parser
from perf.sim.fleet.report import FleetCell, FleetFigures
from perf.sim.fleet.scene import PATIENCE, FleetLoad, FleetScene
from perf.sim.fleet.sharing import SHARINGS, Sharing
from perf.sim.fleet.world import VirtualFleet

_COLUMNS = (
    "sharing,met %,lowest … highest,met/s,waste %,wait p99 ms,refused %,found full %,doors,"
    "first door %,tenants,others %,store/s"
)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """One run to be made."""

    scene: FleetScene
    sharing: Sharing
    trace: Path
    seed: int


def run_fleet(spec: FleetSpec) -> FleetFigures:
    """Simulate one run in this process."""
    load = FleetLoad.of(spec.trace)
    return FleetFigures.of(VirtualFleet(spec.scene, spec.sharing, load, spec.seed).run())


def scenes_of(args: argparse.Namespace) -> list[FleetScene]:
    """Scenes that the options ask for: each load as it is, and one that differs in each way."""
    plain = FleetScene(
        args.instances,
        args.members,
        1.0,
        stale_s=args.stale_ms / 1000,
        warm_s=args.warm,
        seconds=args.seconds,
    )
    found = []
    for load in args.loads:
        scene = replace(plain, load=load)
        for change in args.scenes:
            match change:
                case "trace":
                    found.append(replace(scene, arrivals="trace"))
                case "skewed":
                    found.append(replace(scene, is_skewed=True))
                case "flood":
                    found.append(replace(scene, has_flood=True))
                case deadlines:
                    found.append(replace(scene, deadlines=deadlines))
    return found


def run_cells(
    scenes: Sequence[FleetScene],
    sharings: Sequence[Sharing],
    trace: Path,
    seeds: Sequence[int],
    processes: int,
) -> Iterator[FleetCell]:
    """Run every way in every scene; yields each cell as it is done."""
    cells = [(scene, sharing) for scene in scenes for sharing in sharings]
    specs = [FleetSpec(*cell, trace, seed) for cell in cells for seed in seeds]
    with ProcessPoolExecutor(processes) as pool:
        runs = pool.map(run_fleet, specs) if processes > 1 else map(run_fleet, specs)
        for scene, sharing in cells:
            yield FleetCell(scene, sharing, tuple(next(runs) for _ in seeds))


def show(cells: Sequence[FleetCell], console: Console) -> None:
    """Print a table for each scene, the loser first."""
    for scene in dict.fromkeys(cell.scene for cell in cells):
        table = Table(title=str(scene), title_justify="left")
        for column in _COLUMNS.split(","):
            table.add_column(column, justify="left" if column == "sharing" else "right")
        own = sorted((c for c in cells if c.scene == scene), key=lambda c: c.median("met"))
        for cell in own:
            met, middle = cell.values("met"), cell.median
            table.add_row(
                cell.sharing.label,
                f"{100 * middle('met'):.1f}",
                f"{100 * min(met):.1f} … {100 * max(met):.1f}",
                f"{middle('met_per_s'):.0f}",
                f"{100 * middle('waste'):.1f}",
                f"{middle('wait_p99_ms'):.0f}",
                f"{100 * middle('refused'):.1f}",
                f"{100 * middle('found_full'):.1f}",
                f"{middle('fair_doors'):.3f}",
                f"{100 * middle('first_door'):.1f}",
                f"{middle('fair_tenants'):.3f}",
                f"{100 * middle('other_tenants'):.1f}",
                f"{middle('store_per_s'):.0f}",
            )
        console.print(table)


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="Azure's columns")
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--members", type=int, default=100, help="orchestrators")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 1.3])
    parser.add_argument(
        "--scenes",
        nargs="+",
        choices=(*PATIENCE, "trace", "skewed", "flood"),
        default=["even"],
        help="even and tight deadlines, the trace's own gaps, a skewed balancer, a tenant's flood",
    )
    parser.add_argument("--only", nargs="+", choices=list(SHARINGS), default=list(SHARINGS))
    parser.add_argument("--stale-ms", type=float, default=250.0, help="between two reports")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds that do not count")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load that count")
    parser.add_argument("--seed", type=int, default=20240229)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser


def main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    if not args.instances >= args.members >= 1:
        parser.error("expected at least one orchestrator, and no fewer instances")
    try:
        FleetLoad.of(args.trace)
    except TraceError as error:
        parser.error(str(error))
    recording = begin(parser, args, "perf.sim.fleet", *sys.argv[1:])
    console = new_console(170)
    begun = time.monotonic()
    cells = []
    seeds = range(args.seed, args.seed + args.seeds)
    sharings = [SHARINGS[name] for name in args.only]
    for cell in run_cells(scenes_of(args), sharings, args.trace, seeds, args.processes):
        cells.append(cell)
        took = f"{time.monotonic() - begun:.0f} s"
        console.print(
            f"{took}: {cell.scene}, {cell.sharing.name}: {100 * cell.median('met'):.1f} %",
            style="dim",
        )
    show(cells, console)
    found = BenchResult(
        "sim-fleet",
        "orchestrators that share instances, on virtual time",
        round(time.monotonic() - begun, 1),
        [figure for cell in cells for figure in cell.figures()],
    )
    recording.save(changed(recording.bundle([found]), engine="sim", model="sim"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
