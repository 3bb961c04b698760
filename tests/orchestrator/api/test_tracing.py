"""OR-16: traces join the caller's ``traceparent``, from HTTP to the steps of the engine."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sites import running_app

pytest.importorskip("opentelemetry.sdk", reason="traces need tidegate[otel]")

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": "fake", "prompt": "a secret thought", "max_tokens": 6, "stream": True}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Where the spans of services made from now on arrive."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from orchestrator.tasks.spans import Tracing

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(
        "orchestrator.build.open_tracing", lambda _, clock: Tracing(provider, clock)
    )
    yield exporter
    provider.shutdown()


async def complete(service: Service, flags: str = "01", **changes: object) -> int:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-{flags}", "X-Correlation-Id": "mine"}
    url = "/v1/completions?what=hidden"
    return (await service.answer("POST", url, json=BODY | changes, headers=headers))[0]


def tree(spans: Any) -> dict[str, str]:
    """Each span's name, and its parent's."""
    finished = spans.get_finished_spans()
    names = {span.context.span_id: span.name for span in finished}
    return {s.name: names.get(s.parent.span_id, f"{s.parent.span_id:016x}") for s in finished}


def named(spans: Any, name: str) -> list[Any]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_a_request_is_one_tree_below_its_caller(
    spans: Any, service: Service, worker: FakeWorker
) -> None:
    assert await complete(service) == 200
    assert tree(spans) == {
        "POST /v1/completions": CALLER,
        "text_completion fake": "POST /v1/completions",
        "admission": "text_completion fake",
        "queue": "text_completion fake",
        "lane": "text_completion fake",
        "wait": "lane",
        "prefill": "lane",
        "decode": "lane",
    }
    finished = spans.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in finished} == {TRACE}
    assert all(span.start_time <= span.end_time for span in finished)
    (task,) = named(spans, "text_completion fake")
    (http,) = named(spans, "POST /v1/completions")
    assert task.end_time <= http.end_time
    attributes = dict(task.attributes)
    assert attributes["tidegate.outcome"] == "met"
    assert attributes["tidegate.correlation_id"] == "mine"
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert dict(named(spans, "lane")[0].attributes)["server.address"] == worker.address
    assert dict(http.attributes)["http.response.status_code"] == 200
    told = str([(span.name, dict(span.attributes), span.events) for span in finished])
    for secret in ("secret", "thought", "hidden", "w0"):
        assert secret not in told


async def test_a_trace_that_nobody_keeps_makes_no_spans(spans: Any, service: Service) -> None:
    assert await complete(service, flags="00") == 200
    async with service.http.get("/health"), service.http.get("/metrics"):
        pass
    assert not spans.get_finished_spans()


async def test_each_attempt_is_a_span(
    spans: Any, make_service: MakeService, make_worker: MakeWorker
) -> None:
    """OR-10: a lost instance shows as the lane that failed, next to the one that went on."""
    workers = [await make_worker(), await make_worker()]
    service = await make_service(*workers)
    for worker in workers:
        worker.plan = lambda submit: (
            Plan(die_at=0) if sum(len(w.submits) for w in workers) == 1 else Plan()
        )
    assert await complete(service) == 200
    first, second = sorted(named(spans, "lane"), key=lambda span: span.start_time)
    assert first.attributes["error.type"] == "instance_lost" and not first.status.is_ok
    assert second.status.is_ok or second.status.is_unset
    (task,) = named(spans, "text_completion fake")
    assert task.attributes["tidegate.attempts"] == 2


async def test_spans_leave_by_otlp(make_service: MakeService, worker: FakeWorker) -> None:
    """A real receiver, told of by the one setting; the last spans leave at the end."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[str] = []

    async def take(request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            received.extend(a.value.string_value for a in resource.resource.attributes)
            for scope in resource.scope_spans:
                received.extend(span.name for span in scope.spans)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with running_app(app) as port:
        service = await make_service(worker, telemetry__otlp_endpoint=f"http://127.0.0.1:{port}/")
        assert await complete(service) == 200
        await service.until(lambda: service.outcomes() == ["met"])
        made = service.orchestrator.tracing
        assert made is not None
        await made.close()
    assert {"tidegate", "decode", "lane", "text_completion fake"} <= set(received)


async def test_without_opentelemetry_the_service_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make_service: MakeService
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    service = await make_service(wait=False, telemetry__otlp_endpoint="http://127.0.0.1:9")
    assert service.orchestrator.tracing is None
    assert "opentelemetry-sdk" in caplog.text
