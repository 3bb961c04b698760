"""``GET /v2/tasks/{id}/explanation``: whom it answers, and what; with a real replaying process."""

from typing import Any

import pytest

from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker, Plan


async def submit(service: Service, token: str = "", **body: object) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = {"prompt": "hi", "max_tokens": 5} | body
    async with service.http.post("/v2/tasks", json=asked, headers=headers) as response:
        assert response.status == 202, await response.text()
        return str((await response.json())["task_id"])


async def explained(service: Service, task: str, status: int = 200, token: str = "") -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    path = f"/v2/tasks/{task}/explanation"
    async with service.http.get(path, headers=headers) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer.get("error", answer)


async def test_a_miss_is_replayed(service: Service, worker: FakeWorker) -> None:
    """The worker makes a token in a millisecond, by its own word, and then stands still."""
    worker.plan = lambda submit: Plan(stall_at=2)
    task = await submit(service, max_tokens=400, deadline_ms=300, ignore_eos=True)
    await service.until(lambda: service.outcomes() == ["missed"])
    answer = await explained(service, task)
    assert (answer["outcome"], answer["code"]) == ("missed", "deadline_exceeded")
    assert answer["reason"].startswith("It had 300 ms: ")
    events = [event["event"] for event in answer["timeline"]]
    assert events[0] == "arrived" and events[1:3] == ["sent", "first_token"]
    assert {"deadline", "ended"} <= set(events)
    replay = answer["replay"]
    assert replay["reproduced"] and replay["requests"] == 1
    assert (replay["answer_tokens"], replay["answer_tokens_known"]) == (400, True)
    (later,) = [one for one in answer["would_have_met"] if one["change"] == "later_deadline"]
    assert later["by_ms"] >= 100 and later["text"] in answer["verdict"]
    assert {"one_more_instance", "nobody_else"} == {one["change"] for one in answer["would_not"]}
    assert answer["not_tried"] == []


async def test_what_did_not_miss_is_said_to_have_not(service: Service, worker: FakeWorker) -> None:
    task = await submit(service)
    await service.until(lambda: service.outcomes() == ["met"])
    answer = await explained(service, task)
    assert answer["reason"].startswith("It was met, ") and answer["replay"] is None
    worker.plan = lambda submit: Plan(stall_at=2)
    running = await submit(service)
    assert "has not ended" in (await explained(service, running, 400))["message"]
    async with service.http.post(f"/v2/tasks/{running}/cancel"):
        pass
    await service.until(lambda: len(service.outcomes()) == 2)
    assert "cancelled" in (await explained(service, running))["reason"]
    assert (await explained(service, "none", 404))["code"] == "not_found"


async def test_a_request_of_another_route_is_known_by_its_answer_and_its_name(
    service: Service,
) -> None:
    body = {"prompt": "hi", "max_tokens": 2}
    headers = {"X-Correlation-Id": "my-own-name"}
    async with service.http.post("/v1/completions", json=body, headers=headers) as response:
        answer = (await response.json())["id"]
    for name in (answer, "my-own-name"):
        assert (await explained(service, name))["completion_tokens"] == 2


async def test_a_key_asks_about_its_own(worker: FakeWorker, make_service: MakeService) -> None:
    keys = {"ann": {"token": "a" * 20}, "bob": {"token": "b" * 20}}
    admin = {"root": {"token": "r" * 20, "is_admin": True}}
    service = await make_service(worker, keys=keys | admin)
    task = await submit(service, "a" * 20)
    await service.until(lambda: service.outcomes() == ["met"])
    assert (await explained(service, task, 404, "b" * 20))["code"] == "not_found"
    for token in ("a" * 20, "r" * 20):
        assert (await explained(service, task, token=token))["outcome"] == "met"


@pytest.mark.parametrize(
    ("kept", "message"), [(1, "latest 1 requests"), (0, "nothing is recorded")]
)
async def test_what_is_no_longer_recorded_is_said_to_be(
    worker: FakeWorker, make_service: MakeService, kept: int, message: str
) -> None:
    service = await make_service(worker, telemetry__recorded_requests=kept)
    first = await submit(service)
    await service.until(lambda: len(service.outcomes()) == 1)
    await submit(service)
    await service.until(lambda: len(service.outcomes()) == 2)
    assert message in (await explained(service, first, 404))["message"]
