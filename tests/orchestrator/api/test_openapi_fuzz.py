"""Requests made up from ``/openapi.json``: no 5xx of ours, and no status that it does not tell of.

``FUZZ_EXAMPLES`` says how many for each route (``make fuzz``); a few in the suite.
"""

import asyncio
import os
from typing import Any

import aiohttp
import hypothesis
import pytest

from tests.orchestrator.conftest import MakeWorker, Service
from tests.support.fake_slots import FakeClips
from tests.support.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "2"))
_OURS_TO_HAVE = {503, 504, 529}
"""What a deadline or a lack of room may end in."""


@pytest.fixture
def schemathesis() -> Any:
    """Here, since its import takes three seconds of every process that collects this."""
    return pytest.importorskip("schemathesis", reason="needs the dev extra's schemathesis")


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    worker = await make_worker()
    worker.slots = FakeClips()
    return worker


def _examples(operation: Any) -> list[Any]:
    """Made up before any is sent: hypothesis knows no event loop."""
    cases: list[Any] = []

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def collect(case: Any) -> None:
        cases.append(case)

    collect()
    return cases


def _aimed(case: Any) -> Any:
    """The same for a model that there is, which made up names never are."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = MODEL
    if "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = MODEL
    return case


async def _sent(service: Service, case: Any) -> tuple[int, str]:
    options: dict[str, Any] = {"headers": {"X-Timeout-Ms": "2000"}}
    if isinstance(case.body, dict | list | str | int | float | bool) or case.body is None:
        options["json"] = case.body
    query = [(name, str(value)) for name, value in (case.query or {}).items()]
    try:
        async with service.http.request(
            case.method, case.formatted_path, params=query, **options
        ) as response:
            return response.status, (await response.text())[:300]
    except (aiohttp.InvalidURL, ValueError):
        return 0, "the client does not send this"


@pytest.mark.timeout(600)
async def test_no_request_breaks_it(service: Service, schemathesis: Any) -> None:
    document = await service.ask("GET", "/openapi.json")
    schema = await asyncio.to_thread(schemathesis.openapi.from_dict, document)
    wrong: list[str] = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.endswith("/events"):  # these have no end
            continue
        told = set(operation.definition.raw["responses"])
        for case in await asyncio.to_thread(_examples, operation):
            for change in (lambda same: same, _aimed):
                status, text = await _sent(service, change(case))
                is_broken = status >= 500 and status not in _OURS_TO_HAVE
                if status and (is_broken or str(status) not in told):
                    wrong.append(f"{operation.label} {case.body!r:.300}: {status} {text}")
    assert not wrong, "\n".join(wrong)
