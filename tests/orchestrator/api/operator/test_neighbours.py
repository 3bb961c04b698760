"""What vLLM's clients and probes ask of a server."""

from typing import Any

from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker


async def get(service: Service, path: str, **headers: str) -> tuple[int, Any]:
    async with service.http.get(path, headers=headers) as response:
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else await response.read()


async def test_the_version_is_told_to_those_with_a_key(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, token="t")
    status, answer = await get(service, "/version")
    assert (status, answer["error"]["code"]) == (401, "unauthenticated")
