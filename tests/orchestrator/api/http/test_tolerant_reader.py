"""What other people's clients send is answered, passed over and told, or refused with a reason."""

import asyncio
import io
import itertools
import json
import logging
import tracemalloc
from typing import Any

import pytest

from orchestrator.api.http.ignored import IGNORED_HEADER, MAX_LOGGED, Ignored, header_of
from tests.orchestrator.api.tools import CARD
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [HI], "max_tokens": 4},
    TEXT: {"model": "fake", "prompt": "hi", "max_tokens": 4},
    RESPONSES: {"model": "fake", "input": "hi", "max_output_tokens": 4},
    MESSAGES: {"model": "fake", "messages": [HI], "max_tokens": 4},
    COUNT: {"model": "fake", "messages": [HI]},
}
TASKS = "/v2/tasks"
NO_FIELD = "is not a known field"


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    """One that knows tools and grammars."""
    return await make_worker(**CARD | {"grammars": "llguidance"})


async def sent(service: Service, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """The status, what was passed over, and the answer or the error's message."""
    async with service.http.post(path, json=body) as response:
        told = response.headers.get(IGNORED_HEADER, "")
        answer = await response.json()
    if response.status == 200:
        return 200, told, answer
    error = answer["error"]
    return response.status, told, error if isinstance(error, str) else error["message"]


@for_each("path", BODIES)
async def test_unknown_fields_are_passed_over_and_named(service: Service, path: str) -> None:
    body = BODIES[path] | {"brand_new": {"with": ["anything"]}, "an_other": None}
    status, told, answer = await sent(service, path, body)
    assert (status, told) == (200, "brand_new, an_other"), answer
    status, told, answer = await sent(service, path, BODIES[path])
    assert (status, told) == (200, ""), answer


async def test_strict_fields_refuses_them(worker: FakeWorker, make_service: MakeService) -> None:
    service = await make_service(worker, http__strict_fields=True)
    for path in BODIES:
        status, told, message = await sent(service, path, BODIES[path] | {"brand_new": 1})
        assert (status, told) == (400, "") and f"brand_new: {NO_FIELD}" in message
    for path, change, word in (
        (CHAT, {"messages": [HI | {"new": 1}]}, f"messages[0].new: {NO_FIELD}"),
        (CHAT, {"prediction": {"type": "content"}}, "prediction"),
        (CHAT, {"max_completion_tokens": 5}, "differ"),
        (CHAT, {"temperature": "0.5"}, "temperature"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        status, _, message = await sent(service, path, BODIES[path] | change)
        assert status == 400 and word in message, message


async def test_they_are_counted_by_place_and_logged_once(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    for _ in range(3):
        body = BODIES[CHAT] | {"brand_new": 1, "messages": [HI | {"new": 1}, HI | {"new": 2}]}
        assert (await sent(service, CHAT, body))[1] == "messages[].new, brand_new"
    named = [getattr(record, "fields", {}).get("ignored") for record in caplog.records]
    assert sorted(filter(None, named)) == ["brand_new", "messages[].new"]
    count = lambda place: service.metric(  # noqa: E731
        "tidegate_ignored_fields_total", route=CHAT, place=place
    )
    assert (count("body"), count("messages[]")) == (3, 3)


async def test_one_name_is_told_of_what_is_not_looked_through(service: Service) -> None:
    """Of many messages only the last has it."""
    body = BODIES[CHAT] | {"messages": [HI] * 3000, "max_tokens": None}
    body["messages"] = [*body["messages"], HI | {"new": 1}]
    assert (await sent(service, CHAT, body))[1] == "messages[].new, ..."


async def test_what_is_kept_of_names_is_bounded(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    for at in range(0, 2 * MAX_LOGGED, 25):
        body = BODIES[CHAT] | {f"new_{at + n}": 1 for n in range(25)}
        assert (await sent(service, CHAT, body))[0] == 200
    logged = [r for r in caplog.records if "ignored" in getattr(r, "fields", {})]
    assert len(logged) == MAX_LOGGED
    body = BODIES[CHAT] | {f"{n}\r\nSet-Cookie: ü" + "x" * 999: 1 for n in range(100)}
    _, told, _ = await sent(service, CHAT, body)
    assert told.startswith("0??Set-Cookie:??xxx") and told.endswith(", ...")
    assert len(told) < 1100 and told.isascii()
    many = Ignored()
    for at in range(100):
        many.add("", f"n{at}")
    assert header_of(many, []).endswith("n31, ...")


def _many(keys: int) -> list[tuple[str, bytes]]:
    """A request with so many unknown keys, in several ways."""
    flat = json.dumps({f"k{n}": n for n in range(keys)})
    nested = '{"k": ' * keys + "1" + "}" * keys
    empty = '{"role": "user", "content": "", "x": 1}'
    message = flat.replace("{", '{"role": "user", "content": "hi", ')
    chat = json.dumps(BODIES[CHAT]).removesuffix("}")
    bodies = {
        "beside": chat + ", " + flat.removeprefix("{"),
        "in one": chat + ', "new": ' + flat + "}",
        "nested": chat + ', "new": ' + nested + "}",
        "lists": chat + ', "new": ' + "[" * 500 + "]" * 500 + "}",
        "in a message": '{"max_tokens": 4, "messages": [' + message + "]}",
        "messages": '{"messages": [' + ",".join([empty] * (2 * keys)) + "]}",
        "half a pair": chat + ', "\\ud800": 1, "new": 1}',
    }
    return [(name, body.encode()) for name, body in bodies.items()]


async def test_many_thousand_unknown_keys_cost_little(service: Service) -> None:
    """No 5xx, and no more memory than some times the body's size."""
    bodies = await asyncio.to_thread(_many, 4_000)
    for name, body in bodies:
        tracemalloc.start()
        async with service.http.post(
            CHAT, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        ) as response:
            status, text = response.status, await response.text()
            told = response.headers.get(IGNORED_HEADER, "")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert status in (200, 400), (name, status, text)
        assert status == 400 or told, name
        assert len(told) < 1100
        assert peak < 30 * len(body) + 4 * 2**20, (name, peak, len(body))


_LATE = ("messages", "input", "tools", "documents", "parameters", "response_format")
"""Fields that are decoded after the body, or in part."""


def _deep(keys: int) -> list[tuple[str, str]]:
    """Values of a field that are large, deep, or both."""
    return [
        ("flat", json.dumps({f"k{n}": n for n in range(keys)})),
        ("nested", '{"k": ' * keys + "1" + "}" * keys),
        ("lists", "[" * keys + "]" * keys),
        ("objects", "[" + ",".join(['{"type": "x", "x": 1}'] * (keys // 4)) + "]"),
    ]


async def test_no_large_or_deep_value_breaks_a_route(service: Service) -> None:
    """Of a field that is not known, and of those that are read late or in part."""
    values = await asyncio.to_thread(_deep, 5_000)
    headers = {"Content-Type": "application/json"}
    turns = itertools.cycle(values)  # seven fields: each has all of them in some dialect
    for (path, body), field in itertools.product(BODIES.items(), ("new", *_LATE)):
        rest = {name: value for name, value in body.items() if name != field}
        head, (name, value) = json.dumps(rest).removesuffix("}"), next(turns)
        data = io.BytesIO(f'{head}, "{field}": {value}}}'.encode())
        async with service.http.post(path, data=data, headers=headers) as response:
            case = (path, field, name, await response.text())
            assert response.status in (200, 400), case
            assert len(response.headers.get(IGNORED_HEADER, "")) < 1100
