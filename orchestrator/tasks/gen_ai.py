"""Times of requests under OpenTelemetry's names, as Prometheus spells them: ``gen_ai.server.…``.

Names, attributes and buckets are those of the conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/), so that dashboards made for
other servers fit.
"""

from functools import cache
from typing import Final

from orchestrator.tasks.job import Api
from orchestrator.tasks.task import Task
from orchestrator.telemetry.metrics import Metrics, exemplar_of

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


class GenAiMetrics:
    """Metrics that count each request once, at its end."""

    def __init__(self, metrics: Metrics) -> None:
        self.duration = metrics.standard_histogram(
            "gen_ai_server_request_duration_seconds",
            "`gen_ai.server.request.duration`: from arrival to the end; `error_type` is the code",
            _DURATION_S,
            *_LABELS,
            "error_type",
        )
        self.first_token = metrics.standard_histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "`gen_ai.server.time_to_first_token`, of requests that ended well",
            _FIRST_TOKEN_S,
            *_LABELS,
        )
        self.per_token = metrics.standard_histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "`gen_ai.server.time_per_output_token`, after the first, of requests that ended well",
            _PER_TOKEN_S,
            *_LABELS,
        )
        # prometheus_client looks labels up under a lock; this caches as many as there are label
        # values.
        self._duration = cache(self.duration.labels)
        self._first_token = cache(self.first_token.labels)
        self._per_token = cache(self.per_token.labels)

    def ended(self, task: Task, model: str, code: str) -> None:
        """Count a task that has ended. ``model`` is a bounded label value, ``code`` empty for a
        request that ended well."""
        marks, labels = task.marks, (operation_of(task.job.api), PROVIDER, model)
        exemplar = exemplar_of(task.job.trace)
        self._duration(*labels, code).observe(marks.ended - marks.received, exemplar)
        if code or not marks.first_token:
            return
        self._first_token(*labels).observe(marks.first_token - marks.received, exemplar)
        if task.completion_tokens > 1:
            decode_s = marks.ended - marks.first_token
            self._per_token(*labels).observe(decode_s / (task.completion_tokens - 1))
