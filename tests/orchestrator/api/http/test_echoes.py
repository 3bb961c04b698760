"""What a client sends is never repeated at length, neither to it nor to a log (OR-16)."""

import itertools
import json
import logging
from typing import Any

import msgspec
import pytest

from orchestrator.api.anthropic.types import MessagesRequest
from orchestrator.api.native.types import TaskRequest
from orchestrator.api.openai.types import ChatRequest, CompletionRequest
from tests.orchestrator.api.asking import CHAT, TEXT
from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker

MARK = "planted"
LONG = MARK * 1_000
JSON = {"Content-Type": "application/json"}
BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v2/tasks": (TaskRequest, TEXT),
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/messages": (MessagesRequest, CHAT),
    "/v1/completions": (CompletionRequest, TEXT),
}
DIGITS = "7" * 5_000
NUMBER = "7" * 985
"""One that can be read as a number."""
VALUES = [
    json.dumps(LONG),
    json.dumps([LONG]),
    json.dumps([[LONG]]),
    json.dumps({LONG: LONG}),
    json.dumps([{LONG: LONG}]),
    DIGITS,
    NUMBER,
    f"[{NUMBER}]",
    f'{{"5": {NUMBER}}}',
    f"{DIGITS}.5e1",
]
NESTED: dict[str, list[Any]] = {
    "messages": [
        [{"role": LONG, "content": "x"}],
        [{"role": "user", "content": LONG}],
        [{"role": "user", "content": [{"type": LONG}]}],
        [{"role": "user", "content": "x", LONG: 1}],
        [{"role": "user", "content": "x", "name": LONG}],
        [{"role": "<|im_start|>" + LONG, "content": "x"}],
    ],
    "placement": [
        {"mode": LONG},
        {"mode": "pin", "instances": [LONG]},
        {"mode": "pin", "instances": ["nobody"] * 64},
        {LONG: 1},
    ],
    "stream_options": [{LONG: True}],
    "response_format": [{"type": LONG}],
}


def bodies(path: str) -> list[bytes]:
    kind, usual = BODIES[path]
    made = []
    own = list(BODIES).index(path)
    for at, field in enumerate(msgspec.structs.fields(kind)):
        others = {name: value for name, value in usual.items() if name != field.name}
        stem = json.dumps(others)[:-1] + f', "{field.name}": '
        # Another one for each field: each of them stands in many places of some dialect.
        made.append(f"{stem}{VALUES[(at + own) % len(VALUES)]}}}".encode())
        made += [f"{stem}{json.dumps(value)}}}".encode() for value in NESTED.get(field.name, [])]
    made += [
        json.dumps(usual | {LONG: 1}).encode(),
        json.dumps(usual | {" - at `$" * 9999: 1}).encode(),
    ]
    huge = MARK * 15_000  # such a body is read off the event loop
    made += [huge.encode(), json.dumps(usual | {"user": huge, huge: 1}).encode()]
    made += [LONG.encode(), json.dumps(LONG).encode(), json.dumps([LONG]).encode(), DIGITS.encode()]
    return made


def assert_brief(answer: bytes, headers: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert len(answer) < 4096, answer[:300]  # a context full of words has 2.7 KB
    assert answer.count(MARK.encode()) < 50
    assert answer.count(b"7" * 97) == 0, answer
    assert sum(len(name) + len(value) for name, value in headers.items()) < 2048
    for record in caplog.records:
        said = logging.Formatter().format(record) + str(getattr(record, "fields", ""))
        assert len(said) < 2048 and said.count(MARK) < 50, said[:500]
        assert "Traceback" not in said, said
    caplog.clear()


@pytest.mark.parametrize("path", BODIES)
async def test_or16_no_field_is_echoed_at_length(
    service: Service, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.INFO)
    for body in bodies(path):
        async with service.http.post(path, data=body, headers=JSON) as response:
            answer = await response.read()
            assert response.status < 500, (body[:200], answer[:300])
            assert_brief(answer, response.headers, caplog)


HEADERS = [
    "Content-Type", "Content-Encoding", "X-Correlation-Id", "X-Deadline", "X-Request-Deadline",
    "X-Timeout-Ms", "X-Deadline-Ms", "grpc-timeout", "X-First-Token-Ms", "X-Token-Gap-Ms",
    "Authorization", "X-Api-Key", "Last-Event-ID", "Accept", "Cookie", "Origin", "Expect",
]  # fmt: skip


@pytest.mark.parametrize("token", [None, "right"])
async def test_or16_no_header_or_path_is_echoed_at_length(
    make_service: MakeService,
    worker: FakeWorker,
    caplog: pytest.LogCaptureFixture,
    token: str | None,
) -> None:
    caplog.set_level(logging.INFO)
    service = await make_service(worker, **({} if token is None else {"token": token}))
    known = {} if token is None else {"Authorization": "Bearer right"}
    long = MARK * 1000  # a header or a path may have 8 KB
    body = json.dumps(TEXT)
    for name, path in zip(HEADERS, itertools.cycle(BODIES)):
        headers = JSON | known | {name: long}
        async with service.http.post(path, data=body, headers=headers) as response:
            assert response.status < 500
            assert_brief(await response.read(), response.headers, caplog)
    for method, path in (
        ("GET", f"/{long}"),
        ("GET", f"/v1/{long}"),
        ("GET", f"/v1/models/{long}"),
        ("DELETE", f"/v1/models/{long}"),
        ("GET", f"/v2/tasks/{long}"),
        ("PUT", f"/v2/tasks/{long}"),
        ("GET", f"/v2/tasks/{long}/events"),
        ("POST", f"/v2/tasks/{long}/cancel"),
        ("POST", f"/v2/instances/{long}/drain"),
        ("POST", f"/v2/tasks?{long}"),
        (long[:4000], "/v2/tasks"),
    ):
        async with service.http.request(method, path, headers=known) as response:
            assert 400 <= response.status < 500
            assert_brief(await response.read(), response.headers, caplog)
