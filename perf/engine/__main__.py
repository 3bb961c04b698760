"""``make bench-engine``: the engine by itself, on random weights of a real shape made on the spot.

    python -m perf.engine [--quick] [--only PART …] [--shape NAME] [--json PATH]
                                [--device cpu|cuda] [--set NAME=VALUE …]

Medians with their spread; what is compared is measured in turns, in one process. ``--set`` changes
a worker setting, for example ``quantize=int8``. The exit status is 1 when a part failed.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from perf.engine.aside import aside
from perf.engine.parts import PARTS, Bench, Load
from perf.engine.rig import Rig
from perf.engine.shapes import SHAPES, make_checkpoint
from perf.report.bundle import BenchResult, Bundle, write
from perf.report.machine import commit, describe_machine, versions
from perf.report.table import show
from perf.stack.context import SEED, Skip

_FULL: Final = Load(repeats=4, new_tokens=48, prompt_tokens=512, batches=(1, 8, 32))
_QUICK: Final = Load(repeats=2, new_tokens=12, prompt_tokens=256, batches=(1, 8))


def run_all(args: argparse.Namespace, console: Console) -> Bundle:
    """Make the checkpoint, load it, measure part after part; a failure is a result too."""
    machine = describe_machine()
    name = args.shape or ("small" if args.quick else "0.5b")
    settings: dict[str, object] = {"model_name": f"random-{name}"}
    settings |= dict(pair.split("=", 1) for pair in args.set)
    load = _QUICK if args.quick else _FULL
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", dir=args.scratch) as scratch:
        console.print(f"making a checkpoint of shape {name} …", style="dim")
        checkpoint = aside(lambda: make_checkpoint(Path(scratch) / name, SHAPES[name], SEED))
        with Rig(checkpoint, args.device, **settings) as rig:
            bench = Bench(checkpoint, args.device, rig, load, Path(scratch), settings)
            card = rig.bundle.card
            results = []
            for part in args.only or PARTS:
                console.print(f"{part} …", style="dim")
                results.append(_run_one(part, bench))
    return Bundle(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "perf.engine", *args.command]),
        commit=commit(),
        quick=args.quick,
        machine=machine,
        versions=versions(),
        engine=f"{card.engine} {card.engine_version}",
        engine_digest=card.engine_digest,
        model=card.model,
        model_digest=card.model_digest,
        results=results,
    )


def _run_one(name: str, bench: Bench) -> BenchResult:
    begun = time.monotonic()
    figures, skipped, failed = [], "", ""
    part = PARTS[name]
    try:
        figures = part(bench)
    except Skip as reason:
        skipped = str(reason)
    except Exception as error:  # whatever it is, the other parts still run
        failed = f"{type(error).__name__}: {error}"
    what = (part.__doc__ or "").partition("\n")[0]
    return BenchResult(name, what, round(time.monotonic() - begun, 1), figures, skipped, failed)


def parse_args(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small shape, few samples")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], metavar="PART")
    parser.add_argument("--shape", choices=list(SHAPES), help="0.5b; small with --quick")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the bundle as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="for the checkpoint")
    args = parser.parse_args(command)
    args.command = command
    return args


def main(command: Sequence[str]) -> int:
    """Run, print, save."""
    args = parse_args(command)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    bundle = run_all(args, console)
    show(bundle, console)
    if args.json:
        write(bundle, args.json)
    return 1 if any(result.failed for result in bundle.results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
