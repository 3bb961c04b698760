"""Ways to share instances, beside each other. See the package."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace as changed
from rich.console import Console
from rich.table import Table

from perf import SEED
from perf.load.trace import TraceError
from perf.report.bundle import BenchResult
from perf.report.command import begin, new_console, new_parser
from perf.sim.fleet.report import FleetCell, FleetFigures
from perf.sim.fleet.scene import FleetLoad, FleetScene, scenes
from perf.sim.fleet.sharing import OURS, SHARINGS, Sharing
from perf.sim.fleet.world import VirtualFleet

COMPARED = {
    "stale": ("free", "two", OURS),
    "uneven": ("free", "two", OURS, "subset-20", "shared-queue", "omniscient"),
}
"""Ways that are compared, by scene; in others all are."""


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


def cells_of(
    loads: Sequence[FleetScene], sharings: Sequence[Sharing]
) -> list[tuple[FleetScene, Sharing]]:
    """What is to be run: each way in each scene in which it is compared."""
    return [
        (scene, sharing)
        for scene in loads
        for sharing in sharings
        if sharing.name in COMPARED.get(scene.name, SHARINGS)
    ]


def run_cells(
    cells: Sequence[tuple[FleetScene, Sharing]], trace: Path, seeds: Sequence[int], processes: int
) -> Iterator[FleetCell]:
    """Run all cells; yields each as it is done."""
    specs = [FleetSpec(*cell, trace, seed) for cell in cells for seed in seeds]
    with ProcessPoolExecutor(processes) as pool:
        runs = pool.map(run_fleet, specs) if processes > 1 else map(run_fleet, specs)
        for scene, sharing in cells:
            yield FleetCell(scene, sharing, tuple(next(runs) for _ in seeds))


def show(cells: Sequence[FleetCell], console: Console) -> None:
    """Print a table for each scene, the loser first."""
    columns = "sharing,kept %,waste %,wait p99 ms,found full %,doors,first door %,tenants,others %"
    for scene in dict.fromkeys(cell.scene for cell in cells):
        table = Table(title=str(scene), title_justify="left")
        for column in columns.split(","):
            table.add_column(column, justify="left" if column == "sharing" else "right")
        own = sorted((c for c in cells if c.scene == scene), key=lambda c: c.median("met"))
        for cell in own:
            middle = cell.median
            table.add_row(
                cell.sharing.label,
                f"{100 * middle('met'):.1f}",
                f"{100 * middle('waste'):.1f}",
                f"{middle('wait_p99_ms'):.0f}",
                f"{100 * middle('found_full'):.1f}",
                f"{middle('fair_doors'):.3f}",
                f"{100 * middle('first_door'):.1f}",
                f"{middle('fair_tenants'):.3f}",
                f"{100 * middle('other_tenants'):.1f}",
            )
        console.print(table)


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="Azure's columns")
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--members", type=int, default=100, help="orchestrators")
    names = list(scenes(1, 1))
    parser.add_argument("--scenes", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", choices=list(SHARINGS), default=list(SHARINGS))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell")
    parser.add_argument("--processes", type=int, default=1)
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
    console = new_console(150)
    begun = time.monotonic()
    by_name = scenes(args.instances, args.members)
    wanted = cells_of([by_name[s] for s in args.scenes], [SHARINGS[name] for name in args.only])
    seeds = range(args.seed, args.seed + args.seeds)
    cells = []
    for cell in run_cells(wanted, args.trace, seeds, args.processes):
        cells.append(cell)
        took = f"{time.monotonic() - begun:.0f} s"
        kept = f"{100 * cell.median('met'):.1f} %"
        console.print(f"{took}: {cell.scene.name}, {cell.sharing.name}: {kept}", style="dim")
    show(cells, console)
    found = BenchResult(
        "sim-fleet",
        f"{args.members} orchestrators in front of {args.instances} instances, on virtual time",
        round(time.monotonic() - begun, 1),
        [figure for cell in cells for figure in cell.figures()],
    )
    recording.save(changed(recording.bundle([found]), engine="sim", model="sim"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
