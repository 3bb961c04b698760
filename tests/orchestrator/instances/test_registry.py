"""Instances that are added, drained and removed while the service works (OR-2, OR-6)."""

from types import SimpleNamespace

import pytest

from orchestrator.instances.discovery import LINGER_S, SourceError
from orchestrator.instances.instance import Instance
from orchestrator.lanes import StreamLane
from orchestrator.lanes.config import RENEW_AFTER_BYTES
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service
from tests.orchestrator.instances.test_discovery import FakeSource
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan, make_card, saying_goodbye

TASK = {"prompt": "x", "max_tokens": 10}


async def submit(service: Service) -> str:
    told = await service.ask("POST", "/v2/tasks", 202, json=TASK)
    return str(told["task_id"])


async def listing(service: Service) -> dict[str, dict[str, object]]:
    return {i["address"]: i for i in (await service.ask("GET", "/v2/instances"))["instances"]}


async def test_or2_an_operator_drains_an_instance_and_takes_it_back(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    first, second = await make_worker(), await make_worker()
    service = await make_service(first, second)
    registry = service.orchestrator.registry
    version = registry.snapshot_version
    plan = Plan(stall_at=1)
    first.plan = second.plan = lambda submit: plan
    await submit(service)
    await submit(service)
    await first.until(lambda: first.running == 1)
    for _ in range(2):
        told = await service.ask(
            "POST", f"/v2/instances/{first.address}/drain", 202, headers=OPERATOR
        )
        assert told["draining"] is True
    assert registry.snapshot_version == version + 1
    for _ in range(3):
        await submit(service)
    await second.until(lambda: second.running == 4)
    assert len(first.submits) == 1
    path = f"/v2/instances/{first.address}/undrain"
    assert (await service.ask("POST", path, 202, headers=OPERATOR))["ready"] is True
    await submit(service)
    await first.until(lambda: len(first.submits) == 2)
    plan.release.set()
    await service.until(lambda: service.outcomes() == ["met"] * 6)


async def test_or2_instances_are_described(service: Service, worker: FakeWorker) -> None:
    described = (await listing(service))[worker.address]
    assert described["state"] == "up"
    assert (described["model"], described["engine_version"]) == ("fake", "0")
    assert (described["slots_total"], described["slots_free"]) == (64, 64)
    assert (described["perf_tokens_per_s"], described["first_token_ms"]) == (None, None)
    worker.step_ms = 10.0
    for _ in range(12):  # jobs that teach its pace
        await service.ask("POST", "/v1/completions", json=TASK | {"model": "fake"})
    pace = service.orchestrator.registry.instances[worker.address].step_learner
    await service.until(lambda: pace is not None and pace.model.known)
    described = (await listing(service))[worker.address]
    assert described["perf_tokens_per_s"] > 0  # type: ignore[operator]
    assert described["first_token_ms"] > 0  # type: ignore[operator]
    told = await service.ask("POST", "/v2/instances/elsewhere:1/drain", 404, headers=OPERATOR)
    assert worker.address in told["error"]["message"]


async def test_lb6_how_long_a_model_took_to_load_is_a_metric(
    service: Service, worker: FakeWorker
) -> None:
    value = service.metric("tidegate_model_load_duration_ms", instance=worker.address, model="fake")
    assert value == 1234.5


async def test_or6_instances_follow_the_list_under_load(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """OR-6: added ones get work, removed ones finish theirs and are forgotten."""
    first, second = await make_worker(), await make_worker()
    plan = Plan(stall_at=1)
    first.plan = second.plan = lambda submit: plan
    service = await make_service(first, LINGER_S=0.1)
    list_anew = service.parts.discovery.list_anew
    registry = service.orchestrator.registry
    version = registry.snapshot_version
    await submit(service)
    await first.until(lambda: first.running == 1)
    assert registry.snapshot_version == version  # load does not move it
    list_anew((first.address, second.address))
    await service.until(lambda: len(registry.instances) == 2 and all(i.ready for i in registry))
    await submit(service)
    await second.until(lambda: second.running == 1)
    assert registry.snapshot_version > version

    list_anew((second.address,))
    await service.until(lambda: registry.instances[first.address].retiring_since is not None)
    await submit(service)
    await second.until(lambda: second.running == 2)
    assert (await listing(service))[first.address]["leaving"] is True
    list_anew((first.address, second.address))
    await service.until(lambda: registry.instances[first.address].ready)
    assert len(first.opens) == 1  # kept, not connected again

    list_anew((second.address,))
    await service.until(lambda: registry.instances[first.address].retiring_since is not None)
    plan.release.set()
    await service.until(lambda: service.outcomes() == ["met"] * 3)
    service.leap(LINGER_S)
    await service.until(lambda: list(registry.instances) == [second.address])
    await first.until(lambda: not first.lanes)


async def test_or6_a_source_that_fails_changes_nothing_and_is_shown(
    service: Service,
) -> None:
    source = FakeSource("dns:x:1")
    source.answer = SourceError("x cannot be resolved")
    await service.parts.discovery.read(source)
    body = await service.ask("GET", "/v2/instances")
    assert body["sources"] == [{"source": "dns:x:1", "error": "x cannot be resolved"}]
    assert [i["ready"] for i in body["instances"]] == [True]


@for_each(
    ("lanes", "best"),
    [
        ([(True, 10.0, 3), (True, 10.1, 2)], 1),
        ([(True, 10.0, 3), (True, 9.0, 0)], 0),  # the idle one may be idle because it is dead
        ([(True, 10.0, 3), (False, 10.5, 0)], 0),
        ([(True, 9.0, 3), (True, 9.2, 2)], 1),  # all are late: we are, more likely
    ],
)
def test_or6_lanes_that_speak_come_before_silent_ones(
    lanes: list[tuple[bool, float, int]], best: int
) -> None:
    instance = Instance("a:1")
    instance.lanes = [
        SimpleNamespace(  # type: ignore[misc]
            is_open=is_open, is_closing=False, is_relieved=False, last_frame_at=at, load=load
        )
        for is_open, at, load in lanes
    ]
    assert instance.best_lane() is instance.lanes[best]


async def test_or6_a_card_that_loads_slowly_does_not_undo_a_newer_one(
    service: Service, worker: FakeWorker
) -> None:
    """An instance that restarts with another model while the first one's tokenizer loads."""
    monitor = service.parts.monitor
    instance = service.orchestrator.registry.instances[worker.address]
    newer = instance.card
    assert newer is not None
    monitor._card_received(instance, make_card(model="older"))
    monitor._card_received(instance, newer)
    await service.until(lambda: not monitor._loading)
    assert instance.card == newer
    assert instance.ready


async def test_pv1_a_registered_instance_gets_work_and_leaves_when_taken_off(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """PV-1: what a pool manager tells over HTTP, at once and again."""
    listed, more = await make_worker(), await make_worker()
    service = await make_service(listed)
    body = {"address": more.address, "ttl_s": 60}
    for status in (201, 200):
        told = await service.ask("POST", "/v2/instances", status, json=body, headers=OPERATOR)
        assert told == body | {"ttl_s": 60.0, "registered": True}
    registry = service.orchestrator.registry
    await service.until(lambda: all(i.ready for i in registry) and len(registry.instances) == 2)
    url = f"/v2/instances/{more.address}"
    for was_there in (True, False):
        told = await service.ask("DELETE", url, headers=OPERATOR)
        assert told["was_registered"] is was_there
    assert registry.instances[more.address].retiring_since is not None
    told = await service.ask("DELETE", f"/v2/instances/{listed.address}", headers=OPERATOR)
    assert told["was_registered"] is False
    assert registry.instances[listed.address].retiring_since is None, "it is listed"
    told = await service.ask("POST", "/v2/instances", 400, json={"address": "x"}, headers=OPERATOR)
    assert told["error"]["message"].startswith("address: ")


async def test_or25_a_lane_whose_server_says_goodbye_is_replaced_before_it_is_cut(
    make_worker: MakeWorker, make_service: MakeService, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await make_worker(options=saying_goodbye(after_ms=200, grace_ms=600_000))
    service = await make_service(worker)
    instance = service.orchestrator.registry.instances[worker.address]
    (lane,) = instance.lanes
    plan = worker.does(Plan(stall_at=1))
    await submit(service)
    await worker.until(lambda: worker.running == 1)
    await service.until(lambda: lane.is_relieved)
    assert lane.load == 1, "its job continues there"
    plan.release.set()
    await service.until(lambda: service.outcomes() == ["met"])
    await service.until(lambda: lane not in instance.lanes)
    assert instance.ready and len(worker.submits) == 1
    assert not [record for record in caplog.records if "lane closed" in record.message]


async def test_a_lane_that_has_carried_much_is_replaced_and_its_jobs_end_on_it(
    worker: FakeWorker, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton keeps what a stream has carried for as long as the stream lives."""
    instance = service.orchestrator.registry.instances[worker.address]
    await service.until(lambda: instance.ready)
    plan = worker.does(Plan(stall_at=1))
    await submit(service)
    await worker.until(lambda: worker.running == 1)
    (first,) = instance.lanes
    assert isinstance(first, StreamLane) and not first.is_exhausted
    first._carried_bytes = RENEW_AFTER_BYTES
    await service.until(lambda: first.is_relieved)
    assert (first.load, len(instance.lanes)) == (1, 2)
    for _ in range(3):
        await submit(service)
    await worker.until(lambda: worker.running == 4)
    assert (first.load, instance.best_lane()) == (1, first.successor)
    plan.release.set()
    await service.until(lambda: service.outcomes() == ["met"] * 4)
    await service.until(lambda: instance.lanes == [first.successor])
    (second,) = instance.lanes
    await service.until(lambda: second.is_open)
    assert instance.ready and second.successor is None
    assert second.submitted_total == 4, "the counters go on"
    assert not [record for record in caplog.records if "lane closed" in record.message]
