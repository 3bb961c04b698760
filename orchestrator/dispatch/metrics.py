"""Metrics of retries, and of the time until abandoned work is freed."""

from orchestrator.dispatch.retry import Retrier, RetryDenied
from orchestrator.telemetry.metrics import MetricRow, Metrics


class DispatchMetrics:
    """Times that the dispatcher observes when an abandoned job ends."""

    def __init__(self, metrics: Metrics) -> None:
        self.cancellation_ms = metrics.histogram(
            "cancellation_detection_latency_ms",
            "From a cancel to the worker's report that slot and blocks are free",
        )
        self.disconnect_ms = metrics.histogram(
            "client_disconnect_detection_ms",
            "From a detected client disconnect to the worker's report that its slot is free",
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
        "Jobs sent again, by kind (OR-10)",
        lambda retrier: [
            ((kind,), retrier.granted[kind]) for kind in ("retry", "continue", "move")
        ],
        ("kind",),
    ),
    MetricRow(
        "counter",
        "retries_denied",
        "jobs",
        "Jobs not sent again, by reason (OR-10, DL-12)",
        lambda retrier: [((why.value,), retrier.denied[why]) for why in RetryDenied],
        ("why",),
    ),
)
