"""What requests came to, and how long each part of them took."""

from orchestrator.tasks.deadline import Part
from orchestrator.telemetry.metrics import Metrics, Row
from worker.protocol import Outcome


class TaskMetrics:
    """Counted by the settler; lanes and dispatch add the tokens that came too late."""

    def __init__(self, metrics: Metrics) -> None:
        self.offered = metrics.counter("offered", "requests", "Requests offered", "api")
        self.outcomes = metrics.counter(
            "outcomes",
            "requests",
            "What offered requests came to (DL-10)",
            "api",
            "model",
            "outcome",
            "code",
        )
        self.missed_parts = metrics.counter(
            "missed_parts", "requests", "Requests missed, by what of them was late (DL-14)", "part"
        )
        for part in Part:
            self.missed_parts.labels(part)
        self.admission_ms = metrics.histogram("admission_ms", "From arrival to the queue")
        self.queue_ms = metrics.histogram("queue_ms", "From the queue to a lane")
        self.dispatch_ms = metrics.histogram(
            "dispatch_ms", "From a lane to the start of generation"
        )
        self.ttft_ms = metrics.histogram("ttft_ms", "From arrival to the first token")
        self.total_ms = metrics.histogram("total_ms", "From arrival to the end")
        self.settled = dict.fromkeys(Outcome, 0)
        """How many requests came to each outcome (DL-10)."""
        self.tokens_generated = 0
        self.tokens_wasted = 0
        self.tokens_late = 0
        metrics.watch(self, _ROWS)

    @property
    def attainment(self) -> float:
        """Requests whose deadline was kept, of all that have ended (DL-10); 1 before any has."""
        ended = sum(self.settled.values())
        return self.settled[Outcome.MET] / ended if ended else 1.0

    @property
    def waste(self) -> float:
        """Tokens for requests that ended neither met nor partial, of all tokens (DL-10)."""
        return self.tokens_wasted / self.tokens_generated if self.tokens_generated else 0.0

    def count_late(self, tokens: int) -> None:
        """Tokens that came after their task had ended: waste, and counted apart."""
        self.tokens_generated += tokens
        self.tokens_wasted += tokens
        self.tokens_late += tokens


_ROWS: tuple[Row[TaskMetrics], ...] = (
    Row(
        "gauge",
        "attainment",
        "share",
        "Requests met, of all that ended (DL-10)",
        lambda of: of.attainment,
    ),
    Row(
        "gauge",
        "waste",
        "share",
        "Tokens for requests not met, of all tokens (DL-10)",
        lambda of: of.waste,
    ),
    Row(
        "counter",
        "tokens_generated",
        "tokens",
        "Tokens received from workers",
        lambda of: of.tokens_generated,
    ),
    Row(
        "counter",
        "tokens_wasted",
        "tokens",
        "Tokens received for requests that were not met",
        lambda of: of.tokens_wasted,
    ),
    Row(
        "counter",
        "tokens_late",
        "tokens",
        "Tokens generated after a deadline or abort",
        lambda of: of.tokens_late,
    ),
)
