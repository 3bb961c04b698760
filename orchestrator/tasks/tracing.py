"""Set-up of traces: whether and where to send them. Loads OpenTelemetry only if needed."""

from typing import TYPE_CHECKING, Final

from orchestrator.clock import Clock
from orchestrator.tasks.metrics import PROVIDER
from orchestrator.telemetry.log import fields, service_log
from worker.extras import pip_install

if TYPE_CHECKING:
    from orchestrator.tasks.spans import Tracing

TRACES_PATH: Final = "/v1/traces"


def open_tracing(endpoint: str | None, clock: Clock) -> "Tracing | None":
    """Traces to an OTLP receiver over HTTP; None if no endpoint is set or the SDK is missing.

    Sampling, headers, resource attributes and batching follow OpenTelemetry's own variables
    (``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_RESOURCE_ATTRIBUTES`` …).
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from orchestrator.tasks.spans import Tracing
    except ImportError as error:
        service_log.warning(
            "no traces are sent: OpenTelemetry is not installed; %s",
            pip_install("otel"),
            extra=fields(missing=error.name),
        )
        return None
    named = Resource({"service.name": PROVIDER}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + TRACES_PATH)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, clock)
