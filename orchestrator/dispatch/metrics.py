"""Metrics of retries and hedges, and of how fast abandoned work is gone."""

from orchestrator.dispatch.hedge import Hedger
from orchestrator.dispatch.retry import Retrier, RetryDenied
from orchestrator.telemetry.metrics import MetricRow, Metrics


class DispatchMetrics:
    """Times that the dispatcher observes when an abandoned job is over."""

    def __init__(self, metrics: Metrics) -> None:
        self.cancellation_ms = metrics.histogram(
            "cancellation_detection_latency_ms",
            "From a cancel to the worker's word that slot and blocks are free",
        )
        self.disconnect_ms = metrics.histogram(
            "client_disconnect_detection_ms",
            "From a client's disconnect, seen, to the worker's word that its slot is free",
        )
        self.abort_freed_ms = metrics.histogram(
            "abort_to_freed_ms",
            "On the worker: from its notice of an abort or deadline to slot and blocks free (WP-5)",
            "cause",
        )


RETRIES: tuple[MetricRow[Retrier], ...] = (
    MetricRow(
        "counter",
        "retries",
        "jobs",
        "Jobs sent again, by what for (OR-10)",
        lambda retrier: [
            ((kind,), retrier.granted[kind]) for kind in ("retry", "continue", "move")
        ],
        ("kind",),
    ),
    MetricRow(
        "counter",
        "retries_denied",
        "jobs",
        "Jobs not sent again, by why (OR-10, DL-12)",
        lambda retrier: [((why.value,), retrier.denied[why]) for why in RetryDenied],
        ("why",),
    ),
)

HEDGES: tuple[MetricRow[Hedger], ...] = (
    MetricRow(
        "counter",
        "hedges",
        "jobs",
        "Hedges sent, and of these won and lost (OR-10)",
        lambda of: [((what,), of.counts[what]) for what in ("begun", "won", "lost")],
        ("what",),
    ),
    MetricRow(
        "counter",
        "hedge_aborts_verified",
        "jobs",
        "Losing attempts of hedged jobs that their worker has confirmed to be gone",
        lambda of: of.counts["verified"],
    ),
)
