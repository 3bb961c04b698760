"""DL-20: what gateways, SDKs and other servers' clients say outside the body, over HTTP."""

from typing import Any

import aiohttp
import pytest

from orchestrator.tasks.task import Task
from tests.orchestrator.api.asking import CHAT, TEXT, chunks_of
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

RESPONSE: dict[str, Any] = {"model": "fake", "input": "x", "max_output_tokens": 4}
ENVOY = {"x-envoy-expected-rq-timeout-ms": "15000"}
KEYS = {"gateway": {"token": "g", "names_tenants": True}, "acme": {"token": "a"}}


def offered(service: Service) -> list[Task]:
    """Tasks as they are let in from now on."""
    tasks: list[Task] = []
    service.orchestrator.on_offered.append(tasks.append)
    return tasks


async def answered(
    service: Service, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> aiohttp.ClientResponse:
    async with service.http.post(path, json=body, headers=headers) as response:
        await response.read()
        return response


@for_each(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", TEXT | {"stream": True}),
        ("/v1/messages", CHAT | {"stream": True}),
        ("/v1/responses", RESPONSE),
    ],
)
async def test_dl20_the_answer_names_the_deadline_that_won(
    service: Service, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    # An SDK's own is between two pieces of a stream, which is no deadline of the whole.
    sdk = ("default", 300_000) if body.get("stream") else ("x-stainless-timeout", 20_000)
    for headers, source, budget_ms in (
        ({}, "default", 300_000),
        (ENVOY, "x-envoy-expected-rq-timeout-ms", 15_000),
        (ENVOY | {"grpc-timeout": "5S"}, "grpc-timeout", 5_000),
        ({"Request-Timeout": "7"}, "Request-Timeout", 7_000),
        ({"x-stainless-timeout": "20"}, *sdk),
    ):
        response = await answered(service, path, body, headers)
        assert response.status == 200
        assert response.headers["X-Deadline-Source"] == source
        assert "x-tidegate-ignored" not in response.headers
        assert 0.5 * budget_ms < worker.submits[-1].budget_ms <= budget_ms
    unread = ENVOY | {"x-request-timeout": "soon", "x-llm-d-slo-ttft-ms": "-1"}
    response = await answered(service, path, body, unread)
    assert response.status == 200
    told = response.headers["x-tidegate-ignored"]
    assert told == "header:x-request-timeout, header:x-llm-d-slo-ttft-ms"
    response = await answered(service, path, body | {"x": 1}, {"x-request-timeout": "soon"})
    assert response.headers["x-tidegate-ignored"] == "header:x-request-timeout, x"


async def test_dl20_a_tasks_status_its_log_and_an_error_name_it_too(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody on the way ends a task that continues by itself."""
    with caplog.at_level("INFO"):
        async with service.http.post(
            "/v2/tasks", json=TEXT, headers=ENVOY | {"X-Timeout-Ms": "60000"}
        ) as response:
            assert response.headers["X-Deadline-Source"] == "X-Timeout-Ms"
            task_id = (await response.json())["task_id"]
        await service.until(lambda: service.outcomes() == ["met"])
    assert (await service.ask("GET", f"/v2/tasks/{task_id}"))["deadline_source"] == "X-Timeout-Ms"
    (source,) = {
        record.__dict__["fields"]["deadline_source"]
        for record in caplog.records
        if "budget" in record.__dict__.get("fields", {})
    }
    assert source == "X-Timeout-Ms"
    late = await answered(service, "/v1/completions", TEXT, {"x-litellm-timeout": "0.001"})
    assert (late.status, late.headers["X-Deadline-Source"]) == (504, "x-litellm-timeout")


async def test_dl20_a_later_call_of_a_run_has_the_runs(service: Service) -> None:
    """Bounded by who waits for that call alone, which says nothing of the run."""
    tasks = offered(service)
    session = {"session_id": "s", "stream": True}
    first = CHAT | session | {"deadline_ms": 60_000, "calls_left": 3}
    for body, headers, source in (
        (first, ENVOY, "x-envoy-expected-rq-timeout-ms"),
        (CHAT | session, {}, "run"),
        (CHAT | session, ENVOY, "x-envoy-expected-rq-timeout-ms"),
    ):
        response = await answered(service, "/v1/chat/completions", body, headers)
        assert response.headers["X-Deadline-Source"] == source
    lefts = [task.deadline.at - task.job.arrived for task in tasks]
    assert lefts[0] == pytest.approx(15)
    assert 20 < lefts[1] <= 60
    assert lefts[2] == pytest.approx(15)


CLASSES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {}, "interactive"),
    ({"service_tier": "flex"}, {}, "batch"),
    ({"service_tier": "priority"}, {"x-llm-d-inference-objective": "batch"}, "interactive"),
    ({"service_tier": "auto"}, {}, "interactive"),
    ({"service_tier": "default", "priority": "batch"}, {}, "batch"),
    ({"priority": 0}, {"x-gateway-inference-objective": "batch"}, "interactive"),
    ({"priority": -3}, {}, "interactive"),
    ({"priority": 10}, {}, "batch"),
    ({}, {"x-llm-d-inference-objective": "batch"}, "batch"),
    ({}, {"x-gateway-inference-objective": "batch"}, "batch"),
    ({}, {"x-gateway-inference-objective": "critical"}, "interactive"),
    ({}, {"x-dynamo-request-priority": "-1"}, "batch"),
    ({"priority": 0}, {"x-dynamo-request-priority": "-1"}, "interactive"),
]
"""What a body and a request's headers say in addition, and the class that is theirs."""


async def test_dl20_service_tiers_priorities_and_objectives_are_classes(
    service: Service, worker: FakeWorker
) -> None:
    tasks = offered(service)
    for more, headers, expected in CLASSES:
        tier = "flex" if expected == "batch" else "default"
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE)):
            answer = await service.ask("POST", path, json=body | more, headers=headers)
            assert tasks[-1].job.priority == expected, (more, headers)
            if "service_tier" in more or path == "/v1/responses":
                assert answer["service_tier"] == tier, (more, headers)
            else:
                assert "service_tier" not in answer
    chunks = await chunks_of(service, "/v1/chat/completions", CHAT | {"service_tier": "flex"})
    assert {chunk["service_tier"] for chunk in chunks} == {"flex"}


async def test_dl20_what_agents_and_other_servers_clients_say_is_heard_or_named(
    service: Service, worker: FakeWorker
) -> None:
    tasks = offered(service)
    path, own = "/v1/chat/completions", {"X-Session-Id": "ours"}
    for headers, session in (
        ({"x-dynamo-session-id": "run-42:researcher"}, "run-42:researcher"),
        ({"X-Claude-Code-Session-Id": "0b5c"}, "0b5c"),
        ({"x-claude-code-session-id": "0b5c"} | own, "ours"),
        ({"x-dynamo-session-id": "no id"}, ""),
    ):
        response = await answered(service, path, CHAT, headers)
        assert tasks[-1].job.session_id == session
        ignored = None if session else "header:x-dynamo-session-id"
        assert response.headers.get("x-tidegate-ignored") == ignored
    headers = {
        "x-dynamo-slo-ttft-ms": "9000",
        "x-request-disconnect-disabled": "?1",
        "x-dynamo-dp-rank": "1",
        "x-dynamo-request-priority": "high",
    }
    hints = {"nvext": {"agent_hints": {"priority": -2, "osl": 9}, "cache_salt": "s"}}
    body = CHAT | hints | {"agent_hint": {}, "vllm_xargs": {"a": 1}}
    response = await answered(service, path, body, headers)
    named = response.headers["x-tidegate-ignored"].split(", ")
    assert set(named) == {
        *("header:x-dynamo-dp-rank", "header:x-dynamo-request-priority", "agent_hint"),
        *("vllm_xargs", "nvext.agent_hints.osl", "nvext.cache_salt"),
    }
    job = tasks[-1].job
    assert (job.on_disconnect, job.priority) == ("continue", "batch")
    assert job.parts.first_token_at == pytest.approx(job.arrived + 9)
    guided = CHAT | {"nvext": {"guided_json": {"type": "object"}}}
    response = await answered(service, path, guided)
    assert response.status == 400 and "guided_json" in await response.text()


@pytest.mark.parametrize(
    ("token", "header", "named", "tenant"),
    [
        ("g", "x-gateway-inference-fairness-id", "zeta", "zeta"),
        ("g", "x-gateway-inference-fairness-id", "default-flow", "gateway"),
        ("g", "x-llm-d-inference-fairness-id", "no name", None),
        ("a", "x-llm-d-inference-fairness-id", "zeta", None),
    ],
)
async def test_dl20_a_fairness_id_is_a_tenant_for_who_may_name_one(
    make_service: MakeService,
    worker: FakeWorker,
    token: str,
    header: str,
    named: str,
    tenant: str | None,
) -> None:
    """Nobody else poses as another tenant by it, and nobody is refused for it."""
    service = await make_service(worker, keys=KEYS)
    tasks = offered(service)
    headers = {"Authorization": f"Bearer {token}", header: named}
    response = await answered(service, "/v1/chat/completions", CHAT, headers)
    assert response.status == 200
    own = {"g": "gateway", "a": "acme"}[token]
    assert tasks[-1].job.tenant == (tenant or own)
    ignored = None if tenant else f"header:{header}"
    assert response.headers.get("x-tidegate-ignored") == ignored
    body = CHAT | {"tenant": own}
    response = await answered(service, "/v1/chat/completions", body, headers)
    assert tasks[-1].job.tenant == own, "what the body says goes before"
