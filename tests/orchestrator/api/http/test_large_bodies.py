"""Large bodies are read and checked off the event loop, not on it (OR-11)."""

import asyncio
import json
import threading
from typing import Any

import pytest

from orchestrator.api.http import body as bodies
from orchestrator.api.http.body import LargeBodies
from orchestrator.api.native.types import TaskRequest
from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker

JSON = {"Content-Type": "application/json"}
LARGE = " " * bodies.INLINE_BYTES


@pytest.mark.parametrize("where", ["decode", "prompt"])
async def test_others_are_served_while_a_large_body_is_decoded(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    began, release = threading.Event(), threading.Event()
    module, name = (bodies, "decode") if where == "decode" else (TaskRequest, "prompt_of")
    original = getattr(module, name)

    def slow(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            release.wait(20)
        return original(*args)

    monkeypatch.setattr(module, name, slow)
    data = json.dumps({"prompt": "x", "max_tokens": 3}) + LARGE
    large = asyncio.create_task(service.http.post("/v2/tasks", data=data, headers=JSON))
    await service.until(began.is_set)
    await service.ask("GET", "/health/live")
    await service.ask("POST", "/v2/tasks", 202, json={"prompt": "x", "max_tokens": 3})
    assert not large.done()
    release.set()
    async with await large as response:
        assert response.status == 202


async def test_or24_large_bodies_of_one_key_keep_no_other_waiting(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: {"token": f"sk-{name}"} for name in ("many", "other")}
    service = await make_service(worker, keys=keys)
    release, log, original = threading.Event(), list[str](), bodies.decode

    def slow(body: bytes, decoder: Any) -> Any:
        release.wait(20)
        log.append(original(body, decoder).prompt)
        return original(body, decoder)

    monkeypatch.setattr(bodies, "decode", slow)

    async def ask(key: str, padding: str) -> int:
        headers = JSON | {"x-api-key": f"sk-{key}"}
        data = json.dumps({"prompt": key, "max_tokens": 1}) + padding
        return (await service.answer("POST", "/v2/tasks", data=data, headers=headers))[0]

    def waiting() -> int:
        return sum(map(len, _large(service)._gate._waiting.values()))

    asked = [asyncio.create_task(ask("many", LARGE)) for _ in range(3)]
    await service.until(lambda: waiting() == 2)
    asked.append(asyncio.create_task(ask("other", 2 * LARGE)))
    await service.until(lambda: waiting() == 3)
    release.set()
    assert await asyncio.gather(*asked) == [202] * 4
    assert log == ["many", "other", "many", "many"]


async def test_a_deadline_in_the_headers_holds_while_a_large_body_waits(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, release = "/v2/tasks", threading.Event()
    original = bodies.decode

    def slow(*args: Any) -> Any:
        release.wait(20)
        return original(*args)

    monkeypatch.setattr(bodies, "decode", slow)
    data = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 3}) + LARGE
    first = asyncio.create_task(service.http.post(path, data=data, headers=JSON))
    await service.until(lambda: _large(service)._gate.is_busy)
    headers = JSON | {"X-Timeout-Ms": "50"}
    error = await service.refused(504, path, data=data, headers=headers)
    assert error["code"] == "deadline_exceeded"
    release.set()
    async with await first as response:
        assert response.status in (200, 202)
    await worker.until(lambda: len(worker.submits) == 1)


def _large(service: Service) -> LargeBodies:
    assert service.runner.app is not None
    return service.runner.app[bodies.LARGE_BODIES]
