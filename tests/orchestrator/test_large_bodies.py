"""Large bodies are read and checked beside the event loop, not on it (OR-11)."""

import asyncio
import json
import threading
import time
from typing import Any

import msgspec
import pytest

from orchestrator.api import body as bodies
from orchestrator.api import native
from orchestrator.api.body import LargeBodies
from orchestrator.api.native import TaskMessage, TaskRequest
from orchestrator.api.openai_types import (
    _ONLY,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TextPart,
)
from orchestrator.errors import InvalidRequest
from tests.orchestrator.conftest import Service
from tests.orchestrator.fake_worker import FakeWorker

JSON = {"Content-Type": "application/json"}
LARGE = " " * bodies.INLINE_BYTES


@pytest.mark.parametrize("where", ["decode", "prompt"])
async def test_others_are_served_while_a_large_body_is_decoded(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    began, release = threading.Event(), threading.Event()
    module, name = (bodies, "decode") if where == "decode" else (native, "_prompt")
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
    async with service.http.get("/health/live") as response:
        assert response.status == 200
    async with service.http.post("/v2/tasks", json={"prompt": "x", "max_tokens": 3}) as response:
        assert response.status == 202
    assert not large.done()
    release.set()
    async with await large as response:
        assert response.status == 202


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"prompt": "x", "max_token": 3}', "max_token: is not a known field"),
        ('{"prompt": 3}', "prompt: Expected"),
        ('{"prompt": "x"', "not valid JSON"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "exactly one of"),
    ],
)
async def test_a_large_body_gets_the_same_errors(service: Service, text: str, word: str) -> None:
    async with service.http.post("/v2/tasks", data=text + LARGE, headers=JSON) as response:
        assert response.status == 400
        assert word in (await response.json())["error"]["message"]


def test_the_thread_rests_as_long_as_it_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a row of large bodies would hold the interpreter lock without a pause."""
    clock, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    def work() -> None:
        clock[0] += 0.5

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    large = LargeBodies()
    for _ in range(3):
        large._work(work)
    assert slept == [0.5, 0.5]
    clock[0] += 10
    large._work(work)
    assert slept == [0.5, 0.5]
    large.close()


def test_messages_are_not_the_collectors() -> None:
    """It would go through hundreds of thousands of them, for three quarters of the decoding."""
    for kind in (TaskMessage, ChatMessage, TextPart):
        assert kind.__struct_config__.gc is False


def test_what_is_ignored_is_not_decoded() -> None:
    """A million empty lists would take half a second, under the interpreter lock."""
    many = msgspec.Raw(b"[" + b"[]," * 1000 + b"[]]")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    ignored = [
        field.name
        for field in msgspec.structs.fields(ChatRequest)
        if field.type is msgspec.Raw and field.name not in {*_ONLY, "logit_bias"}
    ]
    assert {"metadata", "user", "store", "reasoning_effort"} <= set(ignored)
    request = msgspec.json.decode(
        msgspec.json.encode(body | dict.fromkeys(ignored, many)), type=ChatRequest
    )
    request.refuse_unsupported()
    assert isinstance(request.metadata, msgspec.Raw)
    for field in ("tools", "response_format", "tool_choice"):
        request = msgspec.json.decode(msgspec.json.encode(body | {field: many}), type=ChatRequest)
        with pytest.raises(InvalidRequest, match=field):
            request.refuse_unsupported()


def test_no_field_may_be_anything() -> None:
    for body in (ChatRequest, CompletionRequest, TaskRequest):
        for field in msgspec.structs.fields(body):
            assert "Any" not in str(field.type), field.name
