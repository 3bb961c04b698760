"""What clients say of the form of an answer, in front of a worker that only notes it."""

import asyncio
import json
import os
import signal
from importlib.util import find_spec
from typing import Any

import pytest

from orchestrator.admission.grammar_compiler import GrammarFinding
from orchestrator.admission.grammars import MS_PER_MIN
from protocol import Grammar, GrammarKind
from tests.orchestrator.conftest import MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TASK = {"prompt": "x", "max_tokens": 2}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(grammars="llguidance")


def as_json(value: object, *, lenient: bool = True) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), lenient)


def strictly(schema: object) -> dict[str, Any]:
    stated = {"schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": stated}}


@for_each(
    ("field", "value", "expected"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, Grammar(GrammarKind.JSON_OBJECT)),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, as_json(SCHEMA)),
        ("response_format", *strictly(SCHEMA).values(), as_json(SCHEMA, lenient=False)),
        (
            "response_format",
            {"type": "structural_tag"} | TAG,
            Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag"} | TAG)),
        ),
        ("structured_outputs", {"json": json.dumps(SCHEMA)}, as_json(SCHEMA)),
        ("structured_outputs", {"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ("structured_outputs", {"choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        (
            "structured_outputs",
            {"grammar": 'root ::= "a"'},
            Grammar(GrammarKind.LARK, 'root ::= "a"'),
        ),
        ("guided_json", SCHEMA, as_json(SCHEMA)),
        ("guided_json", True, as_json(True)),
        ("guided_regex", "a+", Grammar(GrammarKind.REGEX, "a+")),
        ("guided_grammar", 'start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
    ],
)
async def test_what_is_asked_for_reaches_the_worker(
    service: Service, worker: FakeWorker, field: str, value: object, expected: Grammar | None
) -> None:
    worker.submits.clear()
    for path, body in (("/v1/chat/completions", CHAT), ("/v2/tasks", TASK)):
        await service.ask("POST", path, 200, 202, json=body | {field: value})
    await service.until(lambda: len(worker.submits) == 2)
    chat, task = worker.submits
    for submit in (chat, task):
        got = submit.grammar
        if got is None or expected is None:
            assert got is expected
            continue
        assert (got.kind, got.lenient) == (expected.kind, expected.lenient)
        if got.kind in (GrammarKind.REGEX, GrammarKind.LARK):
            assert got.text == expected.text
        elif got.text:
            assert json.loads(got.text) == json.loads(expected.text)
        assert submit.begun_tokens == 0


@for_each(
    ("body", "message", "param"),
    [
        ({"response_format": {"type": "xml"}}, "'xml' is not supported", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema", "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "x", None),
        (strictly({"type": "array", "uniqueItems": True}), "uniqueItems", "response_format"),
        (strictly({"type": "string", "format": "zip"}), "Unknown format: zip", "response_format"),
        (strictly({"type": "string", "pattern": "(?=a)b"}), "look-around", "response_format"),
        ({"guided_json": "{"}, "not JSON", "guided_json"),
        ({"guided_json": {"type": "integer", "multipleOf": 99991}}, "multipleOf", "guided_json"),
        ({"guided_json": "false"}, "no text matches", "guided_json"),
        ({"guided_json": '{"enum": ["\\ud800"]}'}, "cannot be used", "guided_json"),
        ({"guided_regex": "(a"}, "unclosed group", "guided_regex"),
        ({"guided_regex": "a" * 300_000}, "at most", "guided_regex"),
        ({"guided_grammar": 'start: "a'}, "grammar", "guided_grammar"),
        ({"guided_choice": []}, "array of strings", "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "send one of them", "guided_regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "exactly one",
            "structured_outputs",
        ),
    ],
)
async def test_what_cannot_be_is_refused_before_it_is_sent(
    service: Service, worker: FakeWorker, body: dict[str, Any], message: str, param: str | None
) -> None:
    for _ in range(2):  # the second time from memory
        error = await service.refused(400, "/v1/chat/completions", json=CHAT | body)
        assert message in error["message"]
        assert param is None or error["param"] == param
    assert not worker.submits


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs the engine of grammars")
async def test_what_cannot_be_enforced_is_passed_over_and_named(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """In a header of every answer, and once in the log, there without the client's own words."""
    caplog.set_level("INFO", "orchestrator.service")
    schema = {
        "properties": {
            "a": {"type": "array", "uniqueItems": True},
            "b": {"type": "string", "format": "my secret"},
            "c": {"type": "string", "pattern": "^(?!\\.)x"},
            "d": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
        }
    }
    chat = "/v1/chat/completions"
    for path, body in ((chat, CHAT), (chat, CHAT | {"stream": True}), ("/v1/completions", TASK)):
        asked = {"model": "fake"} | body | {"guided_json": schema}
        async with service.http.post(path, json=asked) as response:
            assert response.status == 200, await response.text()
            told = response.headers["x-tidegate-ignored"].split(", ")
        names = ("uniqueItems", "format=my?secret", "pattern", "oneOf")
        assert sorted(told) == sorted(f"guided_json.{name}" for name in names)
    (record,) = [record for record in caplog.records if "are ignored" in record.message]
    assert "format oneOf pattern uniqueItems" in str(vars(record)) and "secret" not in str(
        vars(record)
    )


async def test_a_check_that_nobody_waits_for_is_given_up(service: Service) -> None:
    """DL-1, WP-1. Nor does its answer become the next one's."""
    endless = {"allOf": [{"pattern": f"(a|b)*{n:03d}(a|b)*"} for n in range(40)]}
    body, url = CHAT | {"guided_json": endless}, "/v1/chat/completions"
    await service.ask("POST", url, 504, json=body | {"deadline_ms": 300})
    client = asyncio.create_task(service.http.post(url, json=body))
    await service.until(lambda: service.orchestrator.live_tasks == 1)
    client.cancel()
    await service.until(lambda: service.orchestrator.live_tasks == 0)
    await service.ask("POST", url, json=CHAT | {"guided_json": SCHEMA})
    assert service.outcomes()[1:] == ["aborted", "met"]


async def test_a_check_goes_to_another_process_if_its_own_is_killed(service: Service) -> None:
    check = service.orchestrator.stages.reader.grammars
    for kind in ({"guided_json": SCHEMA}, {"guided_regex": "a|b"}):
        await service.ask("POST", "/v1/chat/completions", json=CHAT | kind)
        assert check._process is not None
        os.kill(check._process.pid, signal.SIGKILL)  # as a kernel without memory does


async def test_or24_many_new_grammars_of_one_tenant_keep_no_other_waiting(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose turn it is in the one process that tries them out goes by tenant, not by arrival."""
    check, log, release = service.orchestrator.stages.reader.grammars, list[str](), asyncio.Event()

    async def try_out(grammar: Grammar) -> GrammarFinding:
        log.append(grammar.text)
        await release.wait()
        return GrammarFinding()

    monkeypatch.setattr(check, "_try_out", try_out)

    async def ask(tenant: str, pattern: str) -> int:
        body = CHAT | {"tenant": tenant, "guided_regex": pattern}
        return (await service.answer("POST", "/v1/chat/completions", json=body))[0]

    live = service.orchestrator
    asked = [asyncio.create_task(ask("many", f"many{number}")) for number in range(5)]
    await service.until(lambda: live.live_tasks == 5 and bool(log))
    asked.append(asyncio.create_task(ask("other", "other")))
    await service.until(lambda: live.live_tasks == 6)
    release.set()
    assert await asyncio.gather(*asked) == [200] * 6
    assert log[1] == "other"


async def test_or24_a_tenant_has_half_of_the_time_for_new_grammars(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = service.orchestrator.stages.reader.grammars

    async def try_out(grammar: Grammar) -> GrammarFinding:
        return GrammarFinding()

    monkeypatch.setattr(check, "_try_out", try_out)
    known, fresh = ({"guided_regex": pattern} for pattern in ("known", "fresh"))
    body, url = CHAT | {"tenant": "many"}, "/v1/chat/completions"
    await service.ask("POST", url, json=body | known)
    check._charge("many", MS_PER_MIN / 1000 + 10, asyncio.get_running_loop().time())
    for wish, status in ((body | known, 200), (body | fresh, 429), (CHAT | fresh, 200)):
        async with service.http.post(url, json=wish) as response:
            assert response.status == status, await response.text()
            if status == 429:
                assert 1 <= int(response.headers["Retry-After"]) <= 60
                assert "30 s to check" in await response.text()
