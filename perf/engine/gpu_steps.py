"""Section ``steps``: CPU time of a step on the worker's threads beside the device, by part."""

from pathlib import Path

import torch

from perf.engine.bare_engine import build, load
from perf.engine.checkpoints import SHAPES, make_checkpoint
from perf.engine.step_cost import ROWS, beside_arithmetic, measure, per_row
from perf.report.rows import Report
from perf.report.stats import median
from worker.text import TextStream


class _OneWord:
    """Stand-in for a detokenizer: a lookup per token."""

    def feed(self, ids: list[int]) -> list[str]:
        return [" word" for _ in ids]

    def flush(self) -> str:
        return ""


def steps(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Measure steps of a small model, since its arithmetic is not what is looked at."""
    path, rows, samples = scratch / "steps", (1, 4) if tiny else ROWS, 1 if tiny else 5
    make_checkpoint(path, SHAPES["tiny" if tiny else "small"], seed=0)
    model, config = load(path, device)
    most = max(rows)
    built = build(model, config, device, max_running=most, blocks=most * 64, prefix_cache=True)
    costs = [
        measure(built.engine, lambda: TextStream(_OneWord()), count, samples)  # type: ignore[arg-type]
        for count in rows
    ]
    for cost in costs:
        report.add(f"{cost.rows} rows: own", median(beside_arithmetic(cost)), "µs/step")
        for part, times in sorted(cost.parts.items()):
            report.add(f"{cost.rows} rows: {part}", median(times), "µs/step")
    report.add("one row more, own", median(per_row(costs, beside_arithmetic)), "µs")
    built.engine.stop()
