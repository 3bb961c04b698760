"""Starts that measure products and attention as if nobody had: do they choose the same?

    python -m perf.engine.choices [--model NAME] [--starts N] [--busy N] [--json PATH]

Each start is a process of its own with no kept choices, one after the other, beside ``--busy``
processes that want a core each.
"""

import asyncio
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from perf.load.models import model_of
from perf.load.usage import busy_loops
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, result
from perf.report.table import show
from worker.engine.build import build_engine
from worker.settings import WorkerSettings


def chosen(model: Path) -> str:
    """Products and attention that a worker of ``model`` chooses here."""
    with tempfile.TemporaryDirectory() as folder:
        settings = WorkerSettings(
            model_path=model, engine="torch", device="cpu", choices_path=Path(folder)
        )
        build_engine(settings).engine.stop()
        (file,) = Path(folder).iterdir()
        kept = json.loads(file.read_text())
        return f"{kept['matrix products']}, attention by {kept['attention']}"


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="what tidegate up takes")
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--busy", type=int, default=1, help="processes that want a core each")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.engine.choices", *sys.argv[1:])
    model, results = asyncio.run(model_of(args.model)), list[BenchResult]()
    context = multiprocessing.get_context("spawn")
    with (
        result(results, "choices", f"beside {args.busy} busy processes") as figures,
        ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes,
        busy_loops(args.busy),
    ):
        for pair, count in Counter(processes.map(chosen, [model] * args.starts)).most_common():
            label = f"of {args.starts} starts: {pair}"
            figures.append(Figure.of(f"choices.{len(figures)}", label, "", [count]))
    bundle = recording.bundle(results, None)
    show(bundle, new_console())
    recording.save(bundle)
    return int(any(one.failed for one in results))


if __name__ == "__main__":
    sys.exit(main())
