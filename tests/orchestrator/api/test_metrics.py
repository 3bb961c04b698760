"""What a scrape tells of requests: outcomes, misses, windows, exemplars (DL-10, LB-8, PF-4)."""

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from orchestrator.telemetry.metrics import MAX_TENANTS, OTHER
from tests.orchestrator.api.asking import CHAT, TEXT
from tests.orchestrator.conftest import MakeService, MakeWorker, Service, bearer
from tests.support.fake_worker import FakeWorker, Plan

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def chat(service: Service, flags: str, **more: object) -> int:
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-{flags}"}
    path = "/v1/chat/completions"
    return (await service.answer("POST", path, json=CHAT | more, headers=headers))[0]


async def exemplars(service: Service) -> set[tuple[str, str]]:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with service.http.get("/metrics", headers=accept) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        text = await response.text()
    return {
        (family.name, sample.exemplar.labels["trace_id"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar is not None
    }


async def test_openmetrics_leads_to_sampled_traces(service: Service) -> None:
    """Only where somebody keeps the trace is there anything to lead to."""
    assert await chat(service, "00") == 200
    assert not await exemplars(service)
    assert await chat(service, "01") == 200
    assert await exemplars(service) == {
        (name, TRACE)
        for name in (
            "tidegate_queue_ms",
            "tidegate_total_ms",
            "tidegate_ttft_ms",
            "gen_ai_server_request_duration_seconds",
            "gen_ai_server_time_to_first_token_seconds",
        )
    }


async def test_tenants_make_a_bounded_number_of_series(service: Service) -> None:
    for number in range(MAX_TENANTS + 2):
        body = TEXT | {"tenant": f"tenant-{number}", "max_tokens": 0}
        await service.ask("POST", "/v2/tasks", 400, json=body)
    labels = {"outcome": "refused", "tenant": OTHER}
    assert service.metric("tidegate_tenant_outcomes_total", **labels) == 2
    assert service.metric("tidegate_tenant_attainment", window="1m", tenant=OTHER) == 0


async def test_tenants_are_named_to_operators_only(
    make_service: MakeService, worker: FakeWorker
) -> None:
    """A scraper without a token learns nothing that one would protect."""
    service = await make_service(worker, token="a-key", admin_token="the-admin")
    headers = {"Authorization": "Bearer a-key"}
    await service.ask("POST", "/v1/completions", json=TEXT, headers=headers)
    for token, shown in (("", False), ("wrong", False), ("a-key", False), ("the-admin", True)):
        for accept in ("text/plain", "application/openmetrics-text"):
            headers = bearer(token) | {"Accept": accept}
            text = await service.ask("GET", "/metrics", headers=headers)
            assert ("tenant=" in text) is shown, token
            assert "tidegate_class_attainment" in text


async def test_dl10_windows_and_responses(service: Service) -> None:
    assert await chat(service, "00") == 200
    assert await chat(service, "00", max_tokens=10**9) == 400
    for name in ("1m", "5m", "15m"):
        labels = {"window": name, "class": "interactive"}
        assert service.metric("tidegate_class_attainment", **labels) == 0.5
        assert service.metric("tidegate_goodput", **labels) > 0
    async with service.http.get("/metrics"):
        pass
    for status in ("200", "400"):
        assert service.metric("tidegate_http_responses_total", status=status) == 1


async def test_pf4_utilization_and_health_failures(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(max_running=2)
    worker.plan = lambda submit: Plan(stall_at=1)
    service = await make_service(worker)
    assert service.metric("tidegate_instance_slots", instance=worker.address) == 2
    assert service.metric("tidegate_utilization") == 0
    await service.ask("POST", "/v2/tasks", 202, json=TEXT)
    await service.until(lambda: service.metric("tidegate_utilization") == 0.5)
    failures = "tidegate_instance_health_failures_total"
    assert service.metric(failures, instance=worker.address) == 0
    await worker.stop()
    await service.until(lambda: service.metric(failures, instance=worker.address) > 3)
    assert service.metric("tidegate_utilization") == 0


async def test_or22_what_endpoint_pickers_read_of_vllm(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    """Where it is asked for, on a page of its own too, without a key."""
    worker = await make_worker(max_running=1)
    service = await make_service(worker, token="t", MOST_BACKLOG=0)
    worker.plan = lambda submit: Plan(stall_at=1)
    for _ in range(3):
        headers = {"Authorization": "Bearer t"}
        await service.ask("POST", "/v2/tasks", 202, json=TEXT, headers=headers)
    await service.until_tokens(1)
    instance = next(iter(service.orchestrator.registry))
    await service.until(lambda: instance.stats is not None)
    stats, card = instance.stats, instance.card
    assert stats is not None and card is not None and stats.kv_blocks_total
    text = await service.ask("GET", "/metrics/vllm")
    found = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text + "# EOF\n")
        for sample in family.samples
    }
    model = {"model_name": "fake"}
    usage = stats.kv_blocks_used / stats.kv_blocks_total
    cache = {"block_size": str(card.block_tokens), "num_gpu_blocks": str(stats.kv_blocks_total)}
    loras = found.pop("vllm:lora_requests_info")
    assert found == {
        "vllm:num_requests_running": (model, 1),
        "vllm:num_requests_waiting": (model, 2),
        "vllm:kv_cache_usage_perc": (model, usage),
        "vllm:gpu_cache_usage_perc": (model, usage),
        "vllm:cache_config_info": (model | cache, 1),
    }
    assert loras[0] == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    everything = await service.ask("GET", "/metrics")
    assert "\nvllm:num_requests_waiting{" in everything and "\ntidegate_offered" in everything


async def test_what_is_kept_of_earlier_requests_is_told_by_holder(
    service: Service, worker: FakeWorker
) -> None:
    """Memory that grows until its bounds are reached is not taken for a leak."""

    def kept(holder: str) -> tuple[float, float]:
        names = ("tidegate_kept_items", "tidegate_kept_bytes")
        items, size = (service.metric(name, holder=holder) for name in names)
        return items, size

    for holder in ("tasks", "responses", "sessions", "lengths"):
        assert kept(holder) == (0, 0)
    asked = {"prompt": "a", "max_tokens": 2}
    task = (await service.ask("POST", "/v2/tasks", 202, json=asked))["task_id"]
    await service.until(lambda: service.outcomes() == ["met"])
    await service.ask("POST", "/v1/responses", json={"input": "a", "max_output_tokens": 2})
    await service.ask("POST", "/v2/sessions", 201, json={})
    for holder in ("tasks", "responses", "lengths"):
        items, size = kept(holder)
        assert items >= 1 and size > 500
    assert kept("sessions")[0] == 1
    assert service.metric("tidegate_resident_peak_bytes") > sum(
        kept(holder)[1] for holder in ("tasks", "responses")
    )
    service.orchestrator.stages.store.forget(service.orchestrator.stages.store.get(task))
    assert kept("tasks") == (0, 0)
