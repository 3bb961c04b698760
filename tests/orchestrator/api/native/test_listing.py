"""``GET /v2/tasks``: what there is, for whom, and no word of it."""

import asyncio
import itertools
from typing import Any

import pytest

from tests.orchestrator.conftest import MakeService, Service, bearer
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan


async def submit(service: Service, prompt: str, token: str = "") -> str:
    body = {"prompt": prompt, "max_tokens": 5}
    task = await service.ask("POST", "/v2/tasks", 202, json=body, headers=bearer(token))
    return str(task["task_id"])


async def listed(service: Service, query: str = "", token: str = "") -> tuple[list[str], bool]:
    body = await service.ask("GET", f"/v2/tasks{query}", headers=bearer(token))
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
    told = await service.ask("GET", "/v2/tasks")
    assert "secret" not in str(told) and "w0" not in str(told)
    first = told["tasks"][0]
    assert (first["model"], first["prompt_tokens"], first["outcome"]) == ("fake", 10, None)
    assert 0 < first["left_ms"] <= 300_000


@for_each("query", ["?limit=0", "?limit=many", "?limit=1001", "?status=lost"])
async def test_what_cannot_be_listed_is_named(service: Service, query: str) -> None:
    body = await service.ask("GET", f"/v2/tasks{query}", 400)
    assert body["error"]["field"] == query[1:].partition("=")[0]


SAYING = [{"role": "user", "content": "secret"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": SAYING, "max_tokens": 5}
LIVE = {
    "/v1/chat/completions": (CHAT, "chat", "chatcmpl-"),
    "/v1/completions": ({"model": "fake", "prompt": "secret"}, "completions", "cmpl-"),
    "/v1/responses": ({"model": "fake", "input": "secret"}, "responses", "resp_"),
    "/v1/messages": (CHAT, "messages", "msg_"),
}


NAMES = ("task_id", "answer_id", "correlation_id")


@for_each(
    ("path", "named_by"),
    zip(LIVE, itertools.cycle(NAMES), strict=False),
)
async def test_or21_what_lives_is_listed_and_cancelled_whatever_its_route(
    service: Service, worker: FakeWorker, path: str, named_by: str
) -> None:
    worker.plan = lambda submit: Plan(stall_at=1)
    body, api, prefix = LIVE[path]
    asked = asyncio.create_task(service.http.post(path, json=body))
    await service.until_tokens(1)
    (line,) = (await service.ask("GET", "/v2/tasks?status=running"))["tasks"]
    assert "secret" not in str(line)
    assert (line["api"], line["answer_id"]) == (api, prefix + line["task_id"])
    told = await service.ask("GET", f"/v2/tasks/{line['answer_id']}")
    assert told["status"] == "running" and "text" not in told
    told = await service.ask("GET", f"/v2/tasks/{line['task_id']}/events", 404)
    assert "on_disconnect" in str(told)
    stopped = await service.ask("DELETE", f"/v2/tasks/{line.get(named_by, named_by)}", 202)
    assert stopped["task_ids"] == [line["task_id"]]
    async with await asked as response:
        assert response.status == 499, await response.text()
    assert service.outcomes()[-1] == "aborted"
    assert await listed(service) == ([], False)


async def test_or21_another_key_neither_sees_nor_stops_it(
    worker: FakeWorker, make_service: MakeService
) -> None:
    keys = {
        "ann": {"token": "a" * 20},
        "bob": {"token": "b" * 20},
        "root": {"token": "c" * 20, "is_admin": True},
    }
    service = await make_service(worker, keys=keys)
    worker.plan = lambda submit: Plan(stall_at=1)
    headers = {"x-api-key": "a" * 20, "X-Correlation-Id": "ours", "x-request-id": "mine"}
    asked = asyncio.create_task(
        service.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    )
    await service.until_tokens(1)
    assert await listed(service, token="b" * 20) == ([], False)
    ((task,), _) = await listed(service, token="a" * 20)
    assert await listed(service, token="c" * 20) == ([task], False)
    paths = ("/v1/chat/completions", "/v1/messages", "/v2/tasks")
    names = (task, f"chatcmpl-{task}", "ours", "mine")
    theirs = (("b", f"{path}/{name}/cancel", 404) for path in paths for name in names)
    for token, path, status in (*theirs, ("c", "/v1/chat/completions/mine/cancel", 202)):
        await service.ask("POST", path, status, headers={"x-api-key": token * 20})
    async with await asked as response:
        assert response.status == 499


async def test_or21_choices_go_by_one_name_until_the_last_has_ended(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=1) if len(worker.submits) > 1 else Plan()
    body = CHAT | {"n": 3}
    asked = asyncio.create_task(service.http.post("/v1/chat/completions", json=body))
    await service.until_tokens(1, tasks=2)
    await service.until(lambda: service.outcomes() == ["met"])
    lines = (await service.ask("GET", "/v2/tasks"))["tasks"]
    (name,) = {line["answer_id"] for line in lines}
    assert len(lines) == 2 and all(line["task_id"] not in name for line in lines)
    assert len((await service.ask("DELETE", f"/v2/tasks/{name}", 202))["task_ids"]) == 2
    async with await asked as response:
        assert response.status == 499
    assert service.outcomes() == ["met", "aborted", "aborted"]


async def test_or21_one_that_waits_for_its_prompt_is_stopped_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def encode(*_: object) -> None:
        await never.wait()

    monkeypatch.setattr(service.orchestrator.stages.reader, "_encode", encode)
    asked = asyncio.create_task(service.http.post("/v1/chat/completions", json=CHAT))
    await service.until(lambda: service.orchestrator.live_tasks == 1)
    ((task,), _) = await listed(service, "?status=queued")
    await service.ask("DELETE", f"/v2/tasks/{task}", 202)
    async with await asked as response:
        assert response.status == 499
    assert service.outcomes() == ["aborted"]
