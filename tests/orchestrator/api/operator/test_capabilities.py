"""OR-2: what the service can do, and one instance by its address."""

from protocol import Feature
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.fake_worker import FakeWorker


async def test_or2_capabilities_are_those_of_what_is_ready(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    lacks = (Feature.KV_EVENTS, Feature.GRAMMAR, Feature.SEED)
    workers = [await make_worker(lacks=lacks), await make_worker(lacks=lacks[:2])]
    service = await make_service(*workers, http__max_body_bytes=2048, queue__max_waiting=7)
    answer = await service.ask("GET", "/v2/capabilities")
    features = set(Feature) - {*lacks[:2], Feature.IMAGES}
    assert answer["features"] == sorted(features)
    assert (answer["models"], answer["durable"], answer["slots"]) == (["fake"], False, False)
    limits = answer["limits"]
    assert (limits["body_bytes"], limits["queue"], limits["max_deadline_ms"]) == (2048, 7, 1800_000)


async def test_or2_one_instance_is_told_as_in_the_list(
    service: Service, worker: FakeWorker
) -> None:
    listed = (await service.ask("GET", "/v2/instances"))["instances"]
    one = await service.ask("GET", f"/v2/instances/{worker.address}")
    assert one.keys() == listed[0].keys() and one["address"] == worker.address
    await service.ask("GET", "/v2/instances/nowhere:1", 404)
