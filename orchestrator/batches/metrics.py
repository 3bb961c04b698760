"""Metrics of batches."""

from orchestrator.batches.service import Batches
from orchestrator.telemetry.metrics import Row

BATCHES: tuple[Row[Batches], ...] = (
    Row(
        "gauge",
        "batches_unfinished",
        "batches",
        "Batches that are not over",
        lambda b: b.unfinished,
    ),
    Row(
        "gauge",
        "batch_lines_under_way",
        "lines",
        "Lines of batches that are being served, or wait to be tried again",
        lambda batches: batches.under_way,
    ),
    Row(
        "gauge",
        "batch_lines",
        "lines",
        "Lines of batches that are kept, by what came of them",
        lambda batches: [((kind.name.lower(),), n) for kind, n in batches.outcomes().items()],
        ("outcome",),
    ),
    Row(
        "gauge",
        "batch_folder_bytes",
        "bytes",
        "What the files of batches take on the disk",
        lambda batches: batches.folder_bytes,
    ),
)
