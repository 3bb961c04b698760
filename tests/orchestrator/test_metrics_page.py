"""docs/metrics.md is what the code declares, and what a service exposes."""

import asyncio
from pathlib import Path

import pytest

from orchestrator.settings.rooms import modules_of_rooms
from orchestrator.telemetry import metrics
from orchestrator.telemetry.metrics import MetricRow, Metrics
from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker
from tools.metrics_page import declared, page

for module in ("extension", "section"):
    modules_of_rooms(module)  # reads folders the first time, which no loop may wait for
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
CURRENT = PAGE.read_text()


REQUIRED = (  # every metric that the requirements name, by what asks for it
    ("DL-10", "tidegate_attainment"),
    ("DL-10", "tidegate_goodput"),
    ("DL-10", "tidegate_tokens_late"),
    ("DL-10", "tidegate_waste"),
    ("DL-13", "tidegate_deadline_check_duration_us"),
    ("DL-17", "tidegate_false_refusal_rate"),
    ("WP-1", "tidegate_client_disconnect_detection_ms"),
    ("WP-2", "tidegate_cancellation_detection_latency_ms"),
    ("WP-5", "tidegate_abort_to_freed_ms"),
    ("LB-1", "tidegate_admission_ms"),
    ("LB-1", "tidegate_queue_ms"),
    ("LB-1", "tidegate_dispatch_ms"),
    ("LB-1", "tidegate_ttft_ms"),
    ("LB-1", "tidegate_total_ms"),
    ("LB-2", "tidegate_time_per_output_token_ms"),
    ("LB-3", "tidegate_per_token_emission_latency_us"),
    ("LB-5", "tidegate_worker_connection_reuse_rate"),
    ("LB-6", "tidegate_model_load_duration_ms"),
    ("LB-6", "tidegate_cuda_init_duration_ms"),
    ("LB-6", "tidegate_http_server_start_duration_ms"),
    ("LB-7", "tidegate_cuda_stream_utilization"),
    ("OR-6", "tidegate_snapshot_version"),
    ("OR-6", "tidegate_instance_slots"),
    ("OR-14", "tidegate_graceful_shutdown_duration_ms"),
    ("WK-5", "tidegate_prefix_blocks_hit"),
    ("WK-5", "tidegate_kv_disk_load_ms"),
    ("WK-5", "tidegate_kv_disk_save_ms"),
    ("PV-1", "tidegate_pool_heartbeat_misses"),
    ("PV-2", "tidegate_preflight_cache_hit_rate"),
    ("PF-4", "tidegate_utilization"),
    ("PF-4", "tidegate_http_responses"),
    ("PF-4", "tidegate_instance_health_failures"),
    ("PF-4", "tidegate_kv_disk_failures"),
    ("PF-7", "tidegate_instances_needed"),
)


async def test_every_required_metric_is_there() -> None:
    names = {metric.name for metric in await declared()}
    assert not [f"{code}: {name}" for code, name in REQUIRED if name not in names]


async def test_the_page_is_current() -> None:
    message = "run python -m tools.metrics_page > docs/metrics.md"
    assert page(await declared()) == CURRENT, message


async def test_what_is_declared_is_what_is_exposed(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, placement__policy="0")
    metrics = service.orchestrator.metrics
    exposed = {family.name: family for family in metrics.registry.collect()}
    assert set(exposed) == {metric.name for metric in metrics.declared}
    for metric in metrics.declared:
        family = exposed[metric.name]
        assert (family.type, family.documentation) == (metric.type, metric.text)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), metric.name


async def test_scrapes_are_encoded_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients that scrape at once take no more of the loop than one."""
    monkeypatch.setattr(metrics, "SLICE_S", 0.0)
    made, read = Metrics(), list[str]()
    for name in ("one", "two"):

        def noted(source: str) -> float:
            read.append(source)
            return 0.0

        made.watch(name, [MetricRow("gauge", name, "", "text", noted)])
    read.clear()
    await asyncio.gather(made.exposition(), made.exposition())
    assert read == ["one", "two", "one", "two"]
