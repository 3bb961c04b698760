"""Checks whether fresh starts choose the same kernels for matrix products and attention.

    python -m perf.engine.choices [--model NAME] [--starts N] [--busy N] [--json PATH]

Each start is a new process without saved choices. Starts run one after the other, while ``--busy``
other processes load one core each.
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
from protocol import ModelCard
from worker.engine.build import build_engine
from worker.settings import WorkerSettings


def chosen(model: Path) -> tuple[str, ModelCard]:
    """The matrix products and attention that a worker of ``model`` chooses here, and its card."""
    with tempfile.TemporaryDirectory() as folder:
        settings = WorkerSettings(
            model_path=model, engine="torch", device="cpu", choices_path=Path(folder)
        )
        built = build_engine(settings)
        built.engine.stop()
        (file,) = Path(folder).iterdir()
        kept = json.loads(file.read_text())
        return f"{kept['matrix products']}, attention by {kept['attention']}", built.card


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
        result(results, "choices", f"fresh starts, {args.busy} processes busy") as figures,
        ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes,
        busy_loops(args.busy),
    ):
        pairs, cards = zip(*processes.map(chosen, [model] * args.starts), strict=True)
        for pair, count in Counter(pairs).most_common():
            label = f"of {args.starts} starts: {pair}"
            figures.append(Figure.of(f"choices.{len(figures)}", label, "", [count]))
    bundle = recording.bundle(results, cards[0])
    show(bundle, new_console())
    recording.save(bundle)
    return int(any(one.failed for one in results))


if __name__ == "__main__":
    sys.exit(main())
