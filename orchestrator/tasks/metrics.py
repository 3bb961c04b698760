"""Metrics of requests: their outcomes and the time of each part."""

from functools import cache
from typing import Final

from orchestrator.clock import Clock
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.task import Task
from orchestrator.tasks.windows import (
    TIMED,
    WINDOWED,
    MissStage,
    Windows,
    blame,
    times_of,
)
from orchestrator.telemetry.metrics import (
    MAX_MODELS,
    MAX_TENANTS,
    TENANT,
    BoundedValues,
    MetricRow,
    Metrics,
    exemplar_of,
)
from protocol import Outcome

PROVIDER: Final = "tidegate"
_CHATS = (Api.CHAT, Api.RESPONSES, Api.MESSAGES)
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_DURATION_S = tuple(0.01 * 2**n for n in range(14))
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def operation_of(api: Api) -> str:
    """Value of ``gen_ai.operation.name`` for an API."""
    return "chat" if api in _CHATS else "text_completion"


class TaskMetrics:
    """Metrics that the settler counts; lanes and dispatch add the tokens that came too late."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        # prometheus_client looks labels up under a lock; ``cache`` keeps as many as there are label
        # values.
        self.offered = metrics.counter(
            "offered", "requests", "Requests submitted, each in the process that admitted it", "api"
        )
        self.recovered = metrics.counter(
            "recovered",
            "requests",
            "Durable requests of an earlier process that this one continues",
            "api",
        )
        labels = "api", "model", "class", "outcome", "code"
        self.outcomes = metrics.counter(
            "outcomes", "requests", "Outcomes of submitted requests (DL-10)", *labels
        )
        self._outcome = cache(self.outcomes.labels)
        tenant_outcomes = metrics.counter(
            "tenant_outcomes",
            "requests",
            "Outcomes of submitted requests by tenant, the first 20, then `other`; for operators",
            TENANT,
            "outcome",
        )
        self._tenant_outcome = cache(tenant_outcomes.labels)
        self.missed_parts = metrics.counter(
            "missed_parts", "requests", "Requests missed, by the part that was late (DL-14)", "part"
        )
        for part in Part:
            self.missed_parts.labels(part)
        self.misses = metrics.counter(
            "misses", "requests", "Requests missed, by the stage to blame", "stage"
        )
        for stage in MissStage:
            self.misses.labels(stage)
        self.missed_ms = metrics.counter(
            "missed_time_ms", "ms", "Time of missed requests, by stage", "stage"
        )
        for stage in TIMED:
            self.missed_ms.labels(stage)
        self.admission_ms = metrics.histogram("admission_ms", "From arrival to the queue")
        self.queue_ms = metrics.histogram("queue_ms", "From entering the queue to a lane")
        self.dispatch_ms = metrics.histogram(
            "dispatch_ms", "From a lane to the start of generation"
        )
        self.ttft_ms = metrics.histogram("ttft_ms", "From arrival to the first token")
        self.tpot_ms = metrics.histogram(
            "time_per_output_token_ms",
            "Each request's mean time between tokens after its first (LB-2)",
        )
        self.total_ms = metrics.histogram("total_ms", "From arrival to the end")
        duration = metrics.standard_histogram(
            "gen_ai_server_request_duration_seconds",
            "`gen_ai.server.request.duration`: from arrival to the end; `error_type` is its code",
            _DURATION_S,
            *_LABELS,
            "error_type",
        )
        self._duration = cache(duration.labels)
        first_token = metrics.standard_histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "`gen_ai.server.time_to_first_token`, of requests that ended well",
            _FIRST_TOKEN_S,
            *_LABELS,
        )
        self._first_token = cache(first_token.labels)
        per_token = metrics.standard_histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "`gen_ai.server.time_per_output_token`, after the first, of requests that ended well",
            _PER_TOKEN_S,
            *_LABELS,
        )
        self._per_token = cache(per_token.labels)
        self.windows = Windows(clock)
        self.settled = dict.fromkeys(Outcome, 0)
        """Number of requests by outcome (DL-10)."""
        self.tokens_generated = 0
        self.tokens_wasted = 0
        self.tokens_late = 0
        self._tenants, self._models = BoundedValues(MAX_TENANTS), BoundedValues(MAX_MODELS)
        metrics.watch(self, _ROWS)
        metrics.watch(self.windows, WINDOWED)

    def ended(self, task: Task, ending: Ending) -> None:
        job, outcome, error = task.job, ending.outcome, ending.error
        code = error.code.value if error is not None else ""
        model, tenant = self._models.of(task.served_name), self._tenants.of(job.tenant)
        self._outcome(job.api, model, job.priority, outcome, code).inc()
        self._tenant_outcome(tenant, outcome).inc()
        self.windows.count(job.priority, tenant, outcome)
        self.settled[outcome] += 1
        if outcome is Outcome.MISSED:
            self._missed(task, ending)
        self.tokens_generated += task.completion_tokens
        if outcome not in (Outcome.MET, Outcome.PARTIAL):
            self.tokens_wasted += task.completion_tokens
        self._observe_times(task, model, code)

    def _missed(self, task: Task, ending: Ending) -> None:
        if ending.missed_part is not None:
            self.missed_parts.labels(ending.missed_part).inc()
        self.misses.labels(blame(task, ending)).inc()
        for stage, ms in times_of(ending.budget).items():
            self.missed_ms.labels(stage).inc(max(0.0, ms))

    def _observe_times(self, task: Task, model: str, code: str) -> None:
        """``code`` is empty for a request that ended well."""
        marks, exemplar = task.marks, exemplar_of(task.job.trace)
        labels = operation_of(task.job.api), PROVIDER, model
        total_s = marks.ended - marks.received
        self.total_ms.observe(1000 * total_s, exemplar)
        self._duration(*labels, code).observe(total_s, exemplar)
        if marks.queued:
            self.admission_ms.observe(1000 * (marks.queued - marks.received))
        if marks.dispatched:
            self.queue_ms.observe(1000 * (marks.dispatched - marks.queued), exemplar)
        if marks.has_started:
            self.dispatch_ms.observe(1000 * (marks.started - marks.dispatched))
        if not marks.first_token:
            return
        first_token_s = marks.first_token - marks.received
        self.ttft_ms.observe(1000 * first_token_s, exemplar)
        if not code:
            self._first_token(*labels).observe(first_token_s, exemplar)
        if task.completion_tokens > 1:
            per_token_s = (marks.ended - marks.first_token) / (task.completion_tokens - 1)
            self.tpot_ms.observe(1000 * per_token_s)
            if not code:
                self._per_token(*labels).observe(per_token_s)

    @property
    def attainment(self) -> float:
        """Share (0 to 1) of requests that ended in time (DL-10); 1 before any ended."""
        ended = sum(self.settled.values())
        return self.settled[Outcome.MET] / ended if ended else 1.0

    @property
    def waste(self) -> float:
        """Share (0 to 1) of tokens for requests that were neither met nor partial (DL-10)."""
        return self.tokens_wasted / self.tokens_generated if self.tokens_generated else 0.0

    def count_late(self, tokens: int) -> None:
        """Count tokens that came after the end of their task: as waste, and separately."""
        self.tokens_generated += tokens
        self.tokens_wasted += tokens
        self.tokens_late += tokens


_ROWS: tuple[MetricRow[TaskMetrics], ...] = (
    MetricRow(
        "gauge",
        "attainment",
        "share",
        "Share of ended requests that were met (DL-10)",
        lambda of: of.attainment,
    ),
    MetricRow(
        "gauge",
        "waste",
        "share",
        "Share of tokens for requests that were not met (DL-10)",
        lambda of: of.waste,
    ),
    MetricRow(
        "counter",
        "tokens_generated",
        "tokens",
        "Tokens received from workers",
        lambda of: of.tokens_generated,
    ),
    MetricRow(
        "counter",
        "tokens_wasted",
        "tokens",
        "Tokens received for requests that were not met",
        lambda of: of.tokens_wasted,
    ),
    MetricRow(
        "counter",
        "tokens_late",
        "tokens",
        "Tokens generated after a deadline or abort",
        lambda of: of.tokens_late,
    ),
)


JOURNAL: tuple[MetricRow[DurableTasks], ...] = (
    MetricRow(
        "gauge",
        "journal_failing",
        "bool",
        "1 while the journal cannot be written, and durable tasks are refused",
        lambda durable: bool(durable.fault),
    ),
    MetricRow(
        "gauge", "journal_live", "tasks", "Durable tasks that have not ended", lambda d: d.live
    ),
    MetricRow(
        "gauge",
        "journal_left",
        "tasks",
        "Durable tasks that a drain left to the next process, which counts their outcomes",
        lambda durable: durable.left,
    ),
    MetricRow(
        "gauge",
        "journal_unwritten",
        "records",
        "Promised records that wait for the disk",
        lambda durable: durable.writer.unwritten,
    ),
    MetricRow(
        "counter",
        "journal_lost",
        "tasks",
        "Tasks that another orchestrator took over while this one stalled; those that also ended"
        " here (ended) are in both outcomes",
        lambda durable: [(("live",), durable.lost), (("ended",), durable.outdone)],
        ("stage",),
    ),
    MetricRow(
        "counter",
        "journal_recovered",
        "tasks",
        "Tasks of an earlier process, by treatment at the start",
        lambda durable: [((how,), count) for how, count in durable.recovered.items()],
        ("how",),
    ),
)
