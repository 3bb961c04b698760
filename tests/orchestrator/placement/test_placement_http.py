"""Placement over real sockets: wishes, cached prefixes, the operator's policy. What no instance can
ever take is refused at once, and what one will take is kept (DL-16)."""

import pytest

from orchestrator.settings import InvalidSettings, load_settings
from protocol import KvReport, block_hashes, prefix_salt
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.fake_worker import FakeWorker

IDS = list(range(10, 110))
TASK = {"prompt_token_ids": IDS, "max_tokens": 2}


async def offer(service: Service, **more: object) -> int:
    async with service.http.post("/v2/tasks", json=TASK | more) as response:
        return response.status


async def test_or9_what_workers_cache_is_known_until_it_is_gone(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    first, second = await make_worker(), await make_worker()
    names = block_hashes(IDS, 16, prefix_salt(b"", ""))
    first.cached = []
    second.cached = names[:4]
    service = await make_service(first, second, lanes__per_instance=2)
    registry = service.orchestrator.registry
    await service.until(lambda: registry.prefixes.count(second.address) == 4)
    await service.until(lambda: all(i.ready for i in registry))
    assert registry.prefixes.longest(names) == {second.address: 4}
    assert service.metric("tidegate_instance_prefix_blocks", instance=second.address) == 4

    for lane in second.lanes:  # which of them is listened to is not ours to know
        await lane.send(cache=KvReport([], names[:1]))
    await service.until(lambda: registry.prefixes.count(second.address) == 3)
    assert registry.prefixes.longest(names) == {}


async def test_or9_when_the_reporting_lane_breaks_another_one_is_asked(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker()
    worker.cached = [b"n" * 32]
    service = await make_service(worker, lanes__per_instance=2)
    registry = service.orchestrator.registry
    instance = registry.instances[worker.address]
    await service.until(lambda: all(lane.is_open for lane in instance.lanes))
    await service.until(lambda: registry.prefixes.count(worker.address) == 1)
    assert instance.reporter is not None
    instance.reporter.break_off("a test")
    await worker.until(lambda: worker.describes == 1)
    await service.until(lambda: registry.prefixes.count(worker.address) == 1)
    registry.prefixes.check_integrity()


async def test_or7_wishes_are_kept(make_worker: MakeWorker, make_service: MakeService) -> None:
    first, second = await make_worker(), await make_worker()
    service = await make_service(first, second)
    for mode, named in (("pin", second), ("avoid", first), ("prefer", second)):
        constraint = {"mode": mode, "instances": [named.address]}
        assert await offer(service, placement=constraint) == 202
    await service.until(lambda: len(service.outcomes()) == 3)
    assert (len(first.submits), len(second.submits)) == (0, 3)


def test_or8_a_bad_policy_is_refused_by_name() -> None:
    with pytest.raises(InvalidSettings, match=r"PLACEMENT__POLICY.*Syntax error"):
        load_settings(placement__policy="instance.nonsense >")


BODY = {"prompt": "ab", "max_tokens": 2}


async def test_dl16_a_pin_to_nothing_there_is_names_what_there_is(
    service: Service, worker: FakeWorker
) -> None:
    placement = {"mode": "pin", "instances": ["10.9.9.9:1"]}
    error = await service.refused(400, "/v2/tasks", json=BODY | {"placement": placement})
    assert error["field"] == "placement.instances"
    assert worker.address in error["message"] and "10.9.9.9:1" in error["message"]
    placement["instances"].append(worker.address)
    await service.ask("POST", "/v2/tasks", 202, json=BODY | {"placement": placement})


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
