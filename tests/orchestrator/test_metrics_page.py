"""docs/metrics.md is what the code declares, and what a service exposes."""

from pathlib import Path

from orchestrator.metrics_page import declared, page
from orchestrator.telemetry.metrics import Declared
from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
CURRENT = PAGE.read_text()


async def test_the_page_is_current() -> None:
    message = "run python -m orchestrator.metrics_page > docs/metrics.md"
    assert page(await declared()) == CURRENT, message


async def test_what_is_declared_is_what_is_exposed(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, placement_policy="0")
    metrics = service.orchestrator.metrics
    exposed = {family.name: family for family in metrics.registry.collect()}
    assert set(exposed) == {metric.name for metric in metrics.declared}
    for metric in metrics.declared:
        family = exposed[metric.name]
        assert (family.type, family.documentation) == (metric.type, metric.text)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), metric.name


async def test_a_metric_more_makes_the_page_stale() -> None:
    more = Declared("gauge", "tidegate_new", "ms", "Something new", ("instance",))
    assert page([*await declared(), more]) != CURRENT
