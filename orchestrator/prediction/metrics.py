"""Metrics of predictions: refusals, and chances against what became of them."""

from collections.abc import Callable

from orchestrator.prediction.calibration import Calibration, ChanceTally
from orchestrator.prediction.feasibility import RefusalCounts, RefusalKind
from orchestrator.telemetry.metrics import Row, Samples


def _by_bin(read: Callable[[ChanceTally], int]) -> Callable[[Calibration], Samples]:
    return lambda calibration: (
        ((priority, str(percent)), read(tally))
        for (priority, percent), tally in calibration.tallies.items()
    )


def refusals(prefix: str, what: str) -> tuple[Row[RefusalCounts], ...]:
    """Metrics of refusals; ``what`` is the plural of what is offered."""
    return (
        Row(
            "counter",
            f"{prefix}infeasible_judged",
            what,
            f"{what.capitalize()} judged certain to miss (DL-7)",
            lambda of: of.infeasible,
        ),
        Row(
            "counter",
            f"{prefix}infeasible_refused",
            what,
            f"{what.capitalize()} refused as certain to miss (DL-7)",
            lambda of: of.refused,
        ),
        Row(
            "counter",
            f"{prefix}unserved",
            what,
            f"{what.capitalize()} ended by our own decision (DL-17)",
            lambda of: [((kind,), of.unserved[kind]) for kind in RefusalKind],
            ("kind",),
        ),
        Row(
            "counter",
            f"{prefix}infeasible_samples",
            what,
            f"Sampled refusals, which were not carried out: what the {what} came to (DL-17)",
            lambda of: [
                ((kind, result), of.sampled[kind, met])
                for kind in RefusalKind
                for result, met in (("met", True), ("lost", False))
            ],
            ("kind", "result"),
        ),
        Row(
            "gauge",
            f"{prefix}false_refusal_rate",
            "share",
            f"Sampled refusals whose {what.removesuffix('s')} was met after all, of all sampled"
            " (DL-17)",
            lambda of: of.false_rate,
        ),
    )


CALIBRATION: tuple[Row[Calibration], ...] = (
    Row(
        "counter",
        "on_time_chance",
        "requests",
        "Requests by the chance of being in time that they had when they were sent, in percent",
        _by_bin(lambda tally: tally.given),
        ("class", "bin"),
    ),
    Row(
        "counter",
        "on_time_met",
        "requests",
        "Requests met, by the chance that they had when they were sent, in percent",
        _by_bin(lambda tally: tally.met),
        ("class", "bin"),
    ),
)
