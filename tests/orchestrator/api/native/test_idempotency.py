"""One task per ``Idempotency-Key``: who has not heard of a submission may send it again."""

import asyncio
from typing import Any

import pytest

from orchestrator.api.native.routes import SUBMISSIONS
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

TASK: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}


async def submit(
    service: Service, key: str | None, status: int = 202, token: str = "", **changes: object
) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    async with service.http.post("/v2/tasks", json=TASK | changes, headers=headers) as response:
        answer = await response.json()
        assert response.status == status, answer
        replayed = response.headers.get("Idempotent-Replayed")
        return (answer["task_id"], replayed) if status == 202 else answer["error"]


async def test_the_same_key_gets_the_same_task(service: Service, worker: FakeWorker) -> None:
    first, replayed = await submit(service, "a")
    assert replayed is None
    await service.until(lambda: service.outcomes() == ["met"])
    assert await submit(service, "a") == (first, "true")
    other, _ = await submit(service, "b")
    without, _ = await submit(service, None)
    assert len({first, other, without}) == 3
    await worker.until(lambda: len(worker.submits) == 3)


async def test_another_body_is_refused(service: Service, worker: FakeWorker) -> None:
    await submit(service, "a")
    error = await submit(service, "a", status=422, max_tokens=5)
    assert (error["code"], error["field"]) == ("invalid_request", "Idempotency-Key")
    assert error["retryable"] is False and service.orchestrator.queue.new == 0
    assert len(_known(service)) == 1
    await submit(service, "refused", status=400, max_tokens=10**6)
    assert len(_known(service)) == 1


async def test_keys_are_their_tokens_own(make_service: MakeService, worker: FakeWorker) -> None:
    keys = {"alice": {"token": "alice-token"}, "bob": {"token": "bob-token"}}
    service = await make_service(worker, keys=keys)
    alices, _ = await submit(service, "a", token="alice-token")
    bobs, _ = await submit(service, "a", token="bob-token")
    assert alices != bobs
    assert await submit(service, "a", token="alice-token") == (alices, "true")


async def test_a_key_is_known_for_as_long_as_its_task(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, KEPT_TASKS={"keep_count": 1})
    held = Plan(stall_at=1)
    plans = [held, Plan(), Plan()]
    worker.plan = lambda submit: plans[min(len(worker.submits) - 1, 2)]
    running, _ = await submit(service, "running")
    for key in ("a", "b"):
        await submit(service, key)
        await service.until(lambda: service.orchestrator.live_tasks == 1)
    assert len(_known(service)) == 2  # the one that runs, and the last that ended
    assert await submit(service, "running") == (running, "true")
    assert (await submit(service, "a"))[1] is None
    held.release.set()


async def test_who_waits_for_another_submission_keeps_a_deadline_of_its_own(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DL-5: the first may have half an hour; and whether it is taken is not known yet."""
    offer, decide, begun = service.orchestrator.submit, asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        await decide.wait()
        return await offer(*args, **kwargs)

    monkeypatch.setattr(service.orchestrator, "submit", slowly)
    first = asyncio.create_task(submit(service, "a"))
    await begun.wait()
    headers = {"Idempotency-Key": "a", "X-Timeout-Ms": "50"}
    async with service.http.post("/v2/tasks", json=TASK, headers=headers) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["retryable"]) == (409, "not_ready", True)
        assert response.headers["x-should-retry"] == "true"
        assert "Retry-After" in response.headers
    decide.set()
    task_id, _ = await first
    assert await submit(service, "a") == (task_id, "true")


@for_each("key", ["", "a b", "é", "x" * 256])
async def test_keys_that_cannot_be(service: Service, worker: FakeWorker, key: str) -> None:
    error = await submit(service, key, status=400)
    assert error["field"] == "Idempotency-Key" and worker.submits == []


def _known(service: Service) -> Any:
    assert service.runner.app is not None
    return service.runner.app[SUBMISSIONS]
