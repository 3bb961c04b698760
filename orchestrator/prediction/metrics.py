"""Metrics of predictions: refusals, and quoted chances against outcomes."""

from collections.abc import Callable
from typing import Any

from orchestrator.prediction.feasibility import RefusalKind, RefusalStats
from orchestrator.prediction.promises import BROKEN, Promises
from orchestrator.prediction.quotes import EDGES, ChanceBin, Quotes
from orchestrator.telemetry.metrics import MetricRow, Samples


def _of_bins(read: Callable[[ChanceBin], int]) -> Callable[[Quotes], Samples]:
    floors = [(f"{100 * edge:g}",) for edge in (0.0, *EDGES)]
    return lambda quotes: zip(floors, map(read, quotes.reliability.bins), strict=True)


def refusals(prefix: str, what: str) -> tuple[MetricRow[RefusalStats[Any]], ...]:
    """Metrics of refusals; ``what`` is the plural of the work's name."""
    return (
        MetricRow(
            "counter",
            f"{prefix}infeasible_judged",
            what,
            f"{what.capitalize()} judged certain to miss (DL-7)",
            lambda of: of.infeasible,
        ),
        MetricRow(
            "counter",
            f"{prefix}infeasible_refused",
            what,
            f"{what.capitalize()} refused as certain to miss (DL-7)",
            lambda of: of.refused,
        ),
        MetricRow(
            "counter",
            f"{prefix}unserved",
            what,
            f"{what.capitalize()} ended by our own decision (DL-17)",
            lambda of: [((kind,), of.unserved[kind]) for kind in RefusalKind],
            ("kind",),
        ),
        MetricRow(
            "counter",
            f"{prefix}infeasible_samples",
            what,
            f"Sampled refusals, which were not carried out, by the outcome of the {what} (DL-17)",
            lambda of: [
                ((kind, result), of.sampled[kind, met])
                for kind in RefusalKind
                for result, met in (("met", True), ("lost", False))
            ],
            ("kind", "result"),
        ),
        MetricRow(
            "gauge",
            f"{prefix}false_refusal_rate",
            "share",
            f"Sampled refusals whose {what.removesuffix('s')} was met after all, of all sampled"
            " (DL-17)",
            lambda of: of.false_rate,
        ),
    )


QUOTES: tuple[MetricRow[Quotes], ...] = (
    MetricRow("counter", "quotes", "quotes", "Quotes made", lambda quotes: quotes.made),
    MetricRow(
        "counter",
        "quoted_chance",
        "requests",
        "Requests by the chance of being in time that was predicted on arrival, in percent; some "
        "requests only, before calibration",
        _of_bins(lambda found: found.given),
        ("bin",),
    ),
    MetricRow(
        "counter",
        "quoted_met",
        "requests",
        "Requests met of those in tidegate_quoted_chance_total",
        _of_bins(lambda found: found.met),
        ("bin",),
    ),
)

PROMISES: tuple[MetricRow[Promises], ...] = (
    MetricRow(
        "counter",
        "reservations",
        "reservations",
        "Deadlines that were reserved, by their promised chance of being kept, in percent",
        lambda promises: [((f"{100 * chance:g}",), promises.reserved[chance]) for chance in BROKEN],
        ("chance",),
    ),
    MetricRow(
        "counter",
        "reservations_ended",
        "reservations",
        "Reserved deadlines of requests that have ended, by chance in percent, kept or broken",
        lambda promises: [
            ((f"{100 * chance:g}", result), promises.ended[chance, kept])
            for chance in BROKEN
            for result, kept in (("kept", True), ("broken", False))
        ],
        ("chance", "result"),
    ),
)
