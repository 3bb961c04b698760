"""``GET /v2/tasks``: what there is, for whom, and no word of it."""

import pytest

from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker, Plan


async def submit(service: Service, prompt: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {"prompt": prompt, "max_tokens": 5}
    async with service.http.post("/v2/tasks", json=body, headers=headers) as response:
        assert response.status == 202, await response.text()
        return str((await response.json())["task_id"])


async def listed(service: Service, query: str = "", token: str = "") -> tuple[list[str], bool]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with service.http.get(f"/v2/tasks{query}", headers=headers) as response:
        assert response.status == 200, await response.text()
        body = await response.json()
        return [task["task_id"] for task in body["tasks"]], body["has_more"]


async def test_what_runs_comes_first_then_what_was_newest_first(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=2) if len(submit.token_ids) == 10 else Plan()
    tasks = [await submit(service, prompt) for prompt in ("a secret y", "a secret", "a secret z")]
    await service.until(lambda: "met" in service.outcomes())
    running = [task for task in tasks if service.orchestrator.store.get(task).ending is None]
    ended = [task for task in tasks if task not in running]
    assert running and ended
    assert await listed(service) == ([*reversed(running), *reversed(ended)], False)
    assert await listed(service, "?status=ended") == (ended[::-1], False)
    assert await listed(service, "?limit=1") == (running[-1:], True)
    async with service.http.get("/v2/tasks") as response:
        text = await response.text()
        first = (await response.json())["tasks"][0]
    assert "secret" not in text and "w0" not in text
    assert (first["model"], first["prompt_tokens"], first["outcome"]) == ("fake", 10, None)
    assert 0 < first["left_ms"] <= 300_000


@pytest.mark.parametrize("query", ["?limit=0", "?limit=many", "?limit=1001", "?status=lost"])
async def test_what_cannot_be_listed_is_named(service: Service, query: str) -> None:
    async with service.http.get(f"/v2/tasks{query}") as response:
        body = await response.json()
    assert (response.status, body["error"]["field"]) == (400, query[1:].partition("=")[0])


async def test_a_key_sees_its_own_tasks(worker: FakeWorker, make_service: MakeService) -> None:
    keys = {
        "ann": {"token": "a" * 20},
        "bob": {"token": "b" * 20},
        "root": {"token": "c" * 20, "is_admin": True},
    }
    service = await make_service(worker, keys=keys)
    mine, theirs = await submit(service, "x", "a" * 20), await submit(service, "y", "b" * 20)
    await service.until(lambda: len(service.outcomes()) == 2)
    assert await listed(service, token="a" * 20) == ([mine], False)
    assert await listed(service, token="b" * 20) == ([theirs], False)
    assert await listed(service, token="c" * 20) == ([theirs, mine], False)
