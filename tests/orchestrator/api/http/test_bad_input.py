"""Bad input gets a 4xx with what was wrong and what was expected; none of it reaches a worker."""

import gzip
import json
from typing import Any

from tests.orchestrator.api.asking import BODIES, CHAT, TEXT
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

JSON = {"Content-Type": "application/json"}
PATHS = TASKS, CHATS, TEXTS = tuple(BODIES)

ANYWHERE: list[tuple[object, int, str, str]] = [
    (b"", 400, "empty", ""),
    (b"{", 400, "JSON", ""),
    (b"[1]", 400, "object", ""),
    (b"\xff\xfe", 400, "UTF-8", ""),
    (b'{"model": "\\ud800"}', 400, "JSON", ""),
    ({"model": "nobody"}, 404, "nobody", "model"),
    ({"model": 7}, 400, "str", "model"),
    ({"max_tokens": 0}, 400, "must be 1 to", "max_tokens"),
    ({"max_tokens": 513}, 400, "at most", "max_tokens"),
    ({"max_tokens": 1.5}, 400, "int", "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "between", "min_tokens"),
    ({"temperature": -1}, 400, "0 to 10", "temperature"),
    ({"temperature": "hot"}, 400, "float", "temperature"),
    ({"top_p": 0}, 400, "above 0", "top_p"),
    ({"top_k": -2}, 400, "0", "top_k"),
    ({"seed": 2**70}, 400, "64 bits", "seed"),
    ({"min_p": 1.5}, 400, "0 to 1", "min_p"),
    ({"repetition_penalty": 0}, 400, "above 0", "repetition_penalty"),
    ({"presence_penalty": 2.5}, 400, "-2 to 2", "presence_penalty"),
    ({"logit_bias": {"262": 1}}, 400, "outside the model's vocabulary, 0 to 261", "logit_bias"),
    ({"logit_bias": {"fox": 1}}, 400, "'fox'", "logit_bias"),
    ({"logit_bias": 5}, 400, "Expected `object | null`, got `int`", "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "-100 to 100", "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(513)}}, 400, "at most 512", "logit_bias"),
    ({"stop": [""]}, 400, "characters", "stop"),
    ({"stop": ["x"] * 17}, 400, "16", "stop"),
    ({"deadline_ms": "soon"}, 400, "float", "deadline_ms"),
    ({"first_token_ms": 0}, 400, "> 0.0", "first_token_ms"),
    ({"token_gap_ms": "soon"}, 400, "float", "token_gap_ms"),
    ({"on_deadline": "panic"}, 400, "'panic'; expected one of: error, partial, fit", "on_deadline"),
    ({"priority": "high"}, 400, "expected one of: interactive, batch", "priority"),
    ({"tenant": ""}, 400, "1 to 128", "tenant"),
    ({"session_id": "a b"}, 400, "1 to 128", "session_id"),
    ({"calls_left": 1001}, 400, "from 0 to 1000", "calls_left"),
    ({"idle_keep_s": 5}, 400, "send its session_id", "idle_keep_s"),
    ({"session_id": "s", "idle_keep_s": 1e9}, 400, "0 to 600 seconds", "idle_keep_s"),
    ({"placement": {"mode": "pin"}}, 400, "needs 1 to 64", "placement.instances"),
    ({"placement": {"instances": ["a:1"]}}, 400, "pin, prefer or avoid", "placement.mode"),
    ({"placement": {"mode": "near"}}, 400, "auto, pin, prefer, avoid", "placement.mode"),
    ({"placement": {"zone": 1}}, 400, "not a known field", "placement.zone"),
    ({"on_disconnect": "cry"}, 400, "'cry'; expected one of: cancel, continue", "on_disconnect"),
]

IN_PLACES: list[tuple[str, object, str, str]] = [
    (TASKS, {"temprature": 1}, "not a known field", "temprature"),
    (TASKS, {"prompt": None}, "exactly one", "prompt"),
    (TASKS, {"messages": []}, "exactly one", "messages"),
    (TASKS, {"prompt": None, "messages": []}, "empty", "messages"),
    (TASKS, {"prompt": None, "prompt_token_ids": []}, "empty", "prompt"),
    (TASKS, {"prompt": None, "prompt_token_ids": [999]}, "261", "prompt_token_ids"),
    (TASKS, {"prompt": ""}, "empty", "prompt"),
    (TASKS, {"prompt": "x" * 512}, "context", "prompt"),
    (TASKS, {"logprobs": 21}, "20", "logprobs"),
    (TEXTS, {"prompt": [999]}, "0 to 261", "prompt"),
    (TEXTS, {"prompt": [1] * 512}, "context", "prompt"),
    (TEXTS, {"prompt": [1, "a"]}, "a string, token ids", "prompt"),
    (TEXTS, {"prompt_logprobs": 1}, "echo and logprobs", "prompt_logprobs"),
    (TEXTS, {"suffix": "x"}, "markers", "suffix"),
    (TEXTS, {"stream_options": {}}, "stream: true", "stream_options"),
    (CHATS, {"messages": []}, "empty", "messages"),
    (CHATS, {"messages": [{"role": "user"}]}, "required", "content"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "only text and images are supported, got 'input_audio'; expected one of: text",
        "type",
    ),
    (
        CHATS,
        {"messages": [{"role": "robot", "content": "x"}]},
        "expected one of: assistant, developer, function, system, tool, user",
        "messages[0].role",
    ),
    (CHATS, {"tools": [{"type": "function"}]}, "required", "function"),
    (CHATS, {"tool_choice": "required"}, "tool calls", "tool_choice"),
    (CHATS, {"response_format": {"type": "json_object"}}, "grammar", "response_format"),
    (CHATS, {"top_logprobs": 2}, "logprobs: true", "top_logprobs"),
    (CHATS, {"logprobs": True, "top_logprobs": 40}, "20", "top_logprobs"),
]

NESTED = b'{"metadata": ' + b"[" * 100_000
IN_PLACES.append((TEXTS, NESTED, "nested", ""))
ENDLESS = json.dumps(CHAT | {"functions": None}).replace("null", "1e999").encode()
"""A number that is read after the rest of the body."""
IN_PLACES.append((CHATS, ENDLESS, "", "functions"))


@for_each("path", PATHS)
async def test_what_is_wrong_is_told_in_the_dialect_of_the_path(
    service: Service, worker: FakeWorker, path: str
) -> None:
    # A third of what is wrong anywhere for each: all is read by the same code.
    cases = ANYWHERE[PATHS.index(path) :: 3]
    cases += [(change, 400, *told) for at, change, *told in IN_PLACES if at == path]
    for change, status, word, field in cases:
        if isinstance(change, bytes):
            data = change
        else:
            assert isinstance(change, dict)
            data = json.dumps(BODIES[path] | change).encode()
        async with service.http.post(path, data=data, headers=JSON) as response:
            text = await response.text()
            assert response.status == status, (change, text)
            assert response.headers["x-should-retry"] == "false"
            assert response.headers["X-Correlation-Id"]
            error = json.loads(text)["error"]
        assert word in error["message"], (change, text)
        named = error.get("field" if path == "/v2/tasks" else "param") or ""
        assert field in named, (change, text)
        if path == "/v2/tasks":
            assert error["retryable"] is False
        else:
            assert error["type"] == "invalid_request_error"
    assert worker.submits == []
    assert service.orchestrator.live_tasks == 0


@for_each(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "/v1/nothing", {}, 404, "not_found"),
        ("GET", "/v1/chat/completions", {}, 405, "method_not_allowed"),
        ("DELETE", "/v2/tasks/x/events", {}, 405, "method_not_allowed"),
        ("POST", "/v2/tasks", {"Content-Type": "text/plain"}, 415, "invalid_request"),
        ("POST", "/v2/tasks", JSON | {"X-Correlation-Id": "x" * 129}, 400, "invalid_request"),
        ("POST", "/v2/tasks", JSON | {"X-Deadline": "tomorrow"}, 400, "invalid_request"),
        ("POST", "/v1/completions", JSON | {"grpc-timeout": "1"}, 400, "invalid_request"),
    ],
)
async def test_paths_methods_and_headers(
    service: Service,
    worker: FakeWorker,
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    body = json.dumps(TEXT)
    async with service.http.request(method, path, data=body, headers=headers) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        assert (await response.json())["error"]["code"] == code
        if status == 405:
            assert ("GET" if "events" in path else "POST") == response.headers["Allow"]
    await service.ask("HEAD", "/v2/tasks/x/events", 405)
    assert worker.submits == []


async def test_a_compressed_body_is_refused_unread(service: Service, worker: FakeWorker) -> None:
    """Inflating one could block the loop: a few kilobytes may hold gigabytes."""
    path, plain = "/v2/tasks", json.dumps(TEXT).encode()
    bomb = gzip.compress(b" " * 2**24)
    for encoding, data in (
        ("gzip", gzip.compress(plain)),
        ("gzip", bomb),
        ("zstd", b"not zstd"),
        ("GZIP", bomb),
        ("identity, gzip", bomb),
        ("rot13", plain),
    ):
        headers = JSON | {"Content-Encoding": encoding}
        error = await service.refused(415, path, data=data, headers=headers)
        assert "Content-Encoding" in error["message"]
        assert error["field"] == "Content-Encoding"
    assert worker.submits == []
    headers = JSON | {"Content-Encoding": "identity"}
    await service.ask("POST", path, 202, data=plain, headers=headers)


async def test_a_body_over_the_limit(worker: FakeWorker, make_service: MakeService) -> None:
    service = await make_service(worker, http__max_body_bytes=2048)

    async def pieces() -> Any:
        for _ in range(3):
            yield b" " * 1024

    for data in (b"x" * 4096, pieces()):
        error = await service.refused(413, "/v2/tasks", data=data, headers=JSON)
        assert error["code"] == "body_too_large"
    assert worker.submits == []
