"""Metrics of swaps and of loads on demand."""

from orchestrator.loading.demand import ModelDemand
from orchestrator.loading.swaps import Swaps
from orchestrator.telemetry.metrics import MetricRow

SWAPS: tuple[MetricRow[Swaps], ...] = (
    MetricRow(
        "counter",
        "model_swaps",
        "swaps",
        "Swaps of an instance's model, by how they ended (WK-7)",
        lambda of: [((result,), of.done[result]) for result in ("done", "failed")],
        ("result",),
    ),
)

DEMAND: tuple[MetricRow[ModelDemand], ...] = (
    MetricRow(
        "counter",
        "model_loads",
        "loads",
        "Models loaded because a request asked for a model that no instance served",
        lambda of: [((result,), of.loads[result]) for result in ("done", "failed")],
        ("result",),
    ),
    MetricRow(
        "counter",
        "model_evictions",
        "models",
        "Models that no instance serves any more because a requested model replaced them",
        lambda of: of.evictions,
    ),
    MetricRow(
        "counter",
        "model_load_refused",
        "requests",
        "Requests refused because their model could not be loaded by their deadline (DL-7)",
        lambda of: of.refused,
    ),
)
