"""Who is let in, what probes and scrapers see, how it ends (OR-12, OR-13, OR-14, OR-16)."""

import asyncio
import json
import logging
import signal
from pathlib import Path

import aiohttp
import msgspec
import pytest

from orchestrator.__main__ import main
from orchestrator.telemetry.log import JsonFormatter
from orchestrator.telemetry.narration import INSTANCE_STATES, READINESS
from protocol import excerpt
from tests.orchestrator.api.conftest import log_until, start_process
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

TASK = {"prompt": "a secret thought", "max_tokens": 10}


async def test_or12_a_token_when_one_is_set(worker: FakeWorker, make_service: MakeService) -> None:
    """OR-12: bearer or ``x-api-key``; probes and metrics need none."""
    service = await make_service(worker, token="right")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
        async with service.http.post("/v2/tasks", json=TASK, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"]["code"] == "unauthenticated"
        told = await service.ask("GET", "/v1/models", 401, headers=headers)
        assert told["error"]["type"] == "authentication_error"
    for headers in ({"Authorization": "bearer right"}, {"x-api-key": "right"}):
        await service.ask("POST", "/v2/tasks", 202, json=TASK, headers=headers)
    for path in ("/health", "/health/live", "/health/ready", "/health/startup", "/metrics"):
        await service.ask("GET", path)
    await service.until(lambda: len(service.ends) == 2)


async def test_or13_probes_may_call_themselves_anything(service: Service) -> None:
    """OR-13: an odd correlation id says nothing about our health."""
    for path in ("/health", "/health/live", "/health/ready", "/health/startup", "/metrics"):
        for given, kept in (("a probe", False), ("x" * 129, False), ("probe-1", True)):
            headers = {"X-Correlation-Id": given}
            async with service.http.get(path, headers=headers) as response:
                assert response.status == 200
                assert (response.headers["X-Correlation-Id"] == given) is kept


async def test_or13_health_before_an_instance_is_there(make_service: MakeService) -> None:
    """OR-13."""
    service = await make_service(wait=False)
    for path, status in (
        ("/health/live", 200),
        ("/health/startup", 503),
        ("/health/ready", 503),
        ("/health", 200),
    ):
        body = await service.ask("GET", path, status)
    assert body["status"] == "not_ready"
    assert body["instances"][0]["state"] == "connecting"
    async with service.http.post("/v1/completions", json=TASK | {"model": "fake"}) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert (await response.json())["error"]["code"] == "not_ready"
    assert await service.ask("GET", "/v1/models") == {"object": "list", "data": []}


async def test_metrics_tell_of_instances_and_outcomes(service: Service) -> None:
    await service.ask("POST", "/v1/completions", json=TASK | {"model": "fake"})
    await service.ask("POST", "/v1/completions", 404, json=TASK | {"model": "m" * 99})
    async with service.http.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = await response.text()
    for line in (
        'tidegate_outcomes_total{api="completions",class="interactive",code="",model="fake",'
        'outcome="met"} 1.0',
        'tidegate_offered_total{api="completions"} 2.0',
        "tidegate_tokens_generated_total 10.0",
        "tidegate_ttft_ms_count 1.0",
    ):
        assert line in text
    assert "m" * 99 not in text, "a client must not be able to make up label values"
    address = next(iter(service.orchestrator.registry.instances))
    for kind, value in (("used", 0), ("free", 100), ("total", 100)):
        assert f'tidegate_kv_blocks{{instance="{address}",kind="{kind}"}} {value}.0' in text
    assert f'tidegate_instance_state{{instance="{address}",state="up"}} 1.0' in text
    again = await service.ask("GET", "/metrics")
    assert {line.split(" ")[0] for line in again.splitlines() if line.startswith("tidegate")} == {
        line.split(" ")[0] for line in text.splitlines() if line.startswith("tidegate")
    }


@pytest.mark.slow
async def test_or14_the_process_ends_and_leaves_no_work(
    worker: FakeWorker, environment: dict[str, str], tmp_path: Path
) -> None:
    """OR-14, OR-16: Ctrl-C with a stream in flight; logs say no word of the prompt."""
    worker.plan = lambda submit: Plan(stall_at=2)
    environment["TIDEGATE_INSTANCES"] = worker.address
    process = await start_process(environment, tmp_path)
    listening = await log_until(process, "listening")
    ready = await log_until(process, INSTANCE_STATES["up"].sentence)
    assert ready["target"] == worker.address
    async with aiohttp.ClientSession(f"http://127.0.0.1:{listening['port']}") as http:
        body = TASK | {"model": "fake", "stream": True}
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200
            process.send_signal(signal.SIGINT)
            text = await response.text()
    assert "draining" in text
    _, rest = await process.communicate()
    assert process.returncode == 0
    assert worker.running == 0
    entries = [json.loads(line) for line in rest.splitlines()]
    ended = next(entry for entry in entries if entry["logger"] == "orchestrator.access")
    assert (ended["outcome"], ended["completion_tokens"]) == ("failed", 2)
    assert ended["correlation_id"] == worker.submits[0].correlation_id
    assert b"secret" not in rest


def test_bad_settings_are_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGATE_PORT", "http")
    assert main([]) == 2
    assert "TIDEGATE_PORT" in capsys.readouterr().err


@pytest.mark.slow
async def test_a_taken_port_is_said_in_a_sentence(
    environment: dict[str, str], tmp_path: Path
) -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await start_process(environment | {"TIDEGATE_PORT": str(port)}, tmp_path)
    _, errors = await process.communicate()
    server.close()
    assert process.returncode == 1
    assert f"choose another port: cannot listen on 127.0.0.1:{port}".encode() in errors


@for_each("value", ["half of a pair: \ud800", 2**70, float("inf"), Path("/a")])
def test_whatever_a_field_holds_its_line_is_written(value: object) -> None:
    record = logging.LogRecord("orchestrator.access", 20, "f", 1, "met", (), None)
    record.fields = {"value": value}
    entry = json.loads(JsonFormatter().format(record))
    assert entry["value"] in (value, str(value), None)


async def test_or13_ready_tells_how_full_and_how_warm_the_instances_are(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """OR-13, WK-5: KV blocks and prefix hit rate; every flip of readiness is logged once."""
    (instance,) = (await service.ask("GET", "/health/ready"))["instances"]
    assert (instance["kv_blocks_used"], instance["kv_blocks_total"]) == (0, 100)
    assert instance["prefix_hit_rate"] is None and instance["running"] == 0
    known = next(iter(service.orchestrator.registry))
    assert known.stats is not None
    known.stats = msgspec.structs.replace(
        known.stats, cached_tokens_total=30, prefill_tokens_total=90
    )
    service.parts.health.refresh()
    (told,) = json.loads(service.parts.health.ready.body)["instances"]
    assert told["prefix_hit_rate"] == 0.25
    with caplog.at_level("INFO", logger="orchestrator.service"):
        service.parts.lifecycle.refuse_new_work()
        service.parts.health.refresh()
    assert [r.getMessage() for r in caplog.records].count(READINESS["draining"].sentence) == 1


async def test_every_answer_has_a_request_id(service: Service) -> None:
    """The client's, where it may be passed on, else the correlation id; in errors too."""
    cases: list[tuple[dict[str, str], tuple[str, str] | None]] = [
        ({}, None),
        ({"x-request-id": "mine-1"}, ("mine-1", "mine-1")),  # so that logs have it
        ({"x-request-id": "mine-1", "X-Correlation-Id": "its-2"}, ("mine-1", "its-2")),
        ({"x-request-id": "not one"}, None),
        ({"x-request-id": "x" * 129}, None),
    ]
    for path in ("/health", "/v1/models", "/v1/none", "/v2/tasks/none"):
        for sent, named in cases:
            async with service.http.get(path, headers=sent) as response:
                told = response.headers["x-request-id"], response.headers["X-Correlation-Id"]
            assert told == (named or told[:1] * 2)
            assert named or sent.get("x-request-id") not in told


async def test_or26_a_model_that_a_silent_instance_may_serve_is_503(
    worker: FakeWorker, make_worker: MakeWorker, make_service: MakeService
) -> None:
    """Until each configured instance has said what it serves; then what nobody serves is 404."""
    late = await make_worker(model="late")
    port = int(late.address.rpartition(":")[2])
    await late.stop()
    service = await make_service(worker, late)
    body = {"model": "late", "prompt": "a", "max_tokens": 1}
    async with service.http.post("/v1/completions", json=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "not_ready")
        assert int(response.headers["Retry-After"]) >= 1
    await service.ask("POST", "/v1/completions", json=body | {"model": "fake"})
    await make_worker(model="late", port=port)
    await service.until(lambda: all(one.ready for one in service.orchestrator.registry))
    for model, status in (("late", 200), ("nobody's", 404)):
        await service.ask("POST", "/v1/completions", status, json=body | {"model": model})


@for_each(
    ("sent", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1//completions", "/v1/completions"),
        ("/models/fake/", "/v1/models/fake"),
        ("/tasks", "/v2/tasks"),
        ("/V1/Messages", "/v1/messages"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/" + "a/" * 3000, None),
        ("/v1/nothing", None),
    ],
)
async def test_a_path_that_is_almost_right_is_told_the_right_one(
    service: Service, sent: str, meant: str | None
) -> None:
    said = (await service.refused(404, sent, json={}))["message"]
    assert said.endswith(f"; try {excerpt(meant)}" if meant else excerpt(sent)), said
