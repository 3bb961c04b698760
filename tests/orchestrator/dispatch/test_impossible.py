"""DL-16: what no instance can ever take is refused at once, and what one will take is kept."""

import pytest

from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker

BODY = {"prompt": "ab", "max_tokens": 2}


async def test_dl16_a_pin_to_nothing_there_is_names_what_there_is(
    service: Service, worker: FakeWorker
) -> None:
    placement = {"mode": "pin", "instances": ["10.9.9.9:1"]}
    async with service.http.post("/v2/tasks", json=BODY | {"placement": placement}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["field"] == "placement.instances"
    assert worker.address in error["message"] and "10.9.9.9:1" in error["message"]
    placement["instances"].append(worker.address)
    async with service.http.post("/v2/tasks", json=BODY | {"placement": placement}) as response:
        assert response.status == 202


@pytest.mark.parametrize(
    ("policy", "status"),
    [
        ('task.tenant == "nobody"', 503),
        ('instance.device == "tpu" ? 1.0 : never', 503),
        ("instance.name == 'elsewhere'", 503),
        ("instance.load < 1", 202),
        ("instance.cached_tokens > 0", 202),
        ("instance.has_session", 202),
        ("instance.kv_free > 1000000", 202),
    ],
)
async def test_dl16_a_policy_that_excludes_all_refuses_at_once(
    make_service: MakeService, worker: FakeWorker, policy: str, status: int
) -> None:
    """Held only by what may come true while it waits."""
    service = await make_service(worker, placement__policy=policy)
    async with service.http.post("/v2/tasks", json=BODY) as response:
        answer = await response.json()
    assert response.status == status
    if status == 503:
        assert answer["error"]["code"] == "no_capacity"
        assert response.headers["x-should-retry"] == "false"
        assert service.outcomes() == ["refused"]
