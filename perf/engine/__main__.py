"""``make bench-engine``: the engine by itself, on random weights of a real shape made on the spot.

    python -m perf.engine [--quick] [--only PART …] [--shape NAME] [--json PATH]
                                [--device cpu|cuda] [--set NAME=VALUE …]

Medians with their spread; what is compared is measured in turns, in one process. ``--set`` changes
a worker setting, for example ``quantize=int8`` or ``kv.blocks=64``. The exit status is 1 when a
part failed.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from perf import SEED
from perf.engine.checkpoints import SHAPES, make_checkpoint
from perf.engine.parts import PARTS, Amount, EngineBench
from perf.engine.rig import EngineRig, run_beside
from perf.report.bundle import BenchResult, Bundle
from perf.report.command import begin, new_console, new_parser, result
from perf.report.recording import Recording
from perf.report.table import show
from worker.environment import DELIMITER

_FULL: Final = Amount(repeats=4, new_tokens=48, prompt_tokens=512, batches=(1, 8, 32))
_QUICK: Final = Amount(repeats=2, new_tokens=12, prompt_tokens=256, batches=(1, 8))


def run_all(args: argparse.Namespace, recording: Recording, console: Console) -> Bundle:
    """Make the checkpoint, load it, measure part after part; a failure is a result too."""
    name = args.shape or ("small" if args.quick else "0.5b")
    settings: dict[str, object] = {"model_name": f"random-{name}"}
    for pair in args.set:
        setting, _, value = pair.partition("=")
        settings[setting.replace(".", DELIMITER)] = value
    load = _QUICK if args.quick else _FULL
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", dir=args.scratch) as scratch:
        console.print(f"making a checkpoint of shape {name} …", style="dim")
        checkpoint = Path(scratch) / name
        run_beside(lambda: make_checkpoint(checkpoint, SHAPES[name], SEED))
        with EngineRig(checkpoint, args.device, **settings) as rig:
            bench = EngineBench(checkpoint, args.device, rig, load, Path(scratch), settings)
            card = rig.loaded.card
            results: list[BenchResult] = []
            for part in args.only or PARTS:
                console.print(f"{part} …", style="dim")
                measure = PARTS[part]
                what = (measure.__doc__ or "").partition("\n")[0]
                with result(results, part, what) as figures:
                    figures += measure(bench)
    return recording.bundle(results, card, quick=args.quick)


def main(command: Sequence[str]) -> int:
    """Run, print, save."""
    parser = new_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small shape, few samples")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], metavar="PART")
    parser.add_argument("--shape", choices=list(SHAPES), help="0.5b; small with --quick")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="for the checkpoint")
    args = parser.parse_args(command)
    recording = begin(parser, args, "perf.engine", *command, seed=SEED)
    console = new_console()
    bundle = run_all(args, recording, console)
    show(bundle, console)
    recording.save(bundle)
    return int(any(each.failed for each in bundle.results))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
