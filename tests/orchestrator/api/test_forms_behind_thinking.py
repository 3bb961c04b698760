"""A stated form holds for the answer of a model that thinks, on every route of chats (OR-3)."""

from typing import Any

import pytest

from protocol import GrammarKind
from tests.orchestrator.api.openai.asking import answer_of
from tests.orchestrator.api.tools import CARD, SCHEMA, says
from tests.orchestrator.conftest import MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

HI = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "name": "f", "schema": SCHEMA}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HI,
        "max_tokens": 99,
        "response_format": {"type": "json_schema", "json_schema": FORMAT},
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 99, "text": {"format": FORMAT}},
    "/v1/messages": {"messages": HI, "max_tokens": 99, "output_config": {"format": FORMAT}},
}
ANSWER = '{"city":"Köln"}'


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(**CARD | {"grammars": "llguidance"})


def parts_of(answer: dict[str, Any]) -> tuple[str, str]:
    """What an answer of any route has of thinking and of text."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        return message.get("reasoning_content") or "", message["content"]
    thought = said = ""
    for item in answer.get("output", answer.get("content")):
        match item["type"]:
            case "reasoning":
                thought += item["content"][0]["text"]
            case "thinking":
                thought += item["thinking"]
            case "message":
                said += item["content"][0]["text"]
            case "text":
                said += item["text"]
    return thought, said


async def asked(
    service: Service, worker: FakeWorker, path: str, said: str, **arguments: object
) -> tuple[str, str, str]:
    """What stood before the answer in its grammar, and the answer's parts."""
    worker.plan = lambda submit: says(said)
    body = {"model": "fake", **ROUTES[path], "chat_template_kwargs": arguments}
    answer = await answer_of(service, path, body)
    grammar = worker.submits[-1].grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    return grammar.before, *parts_of(answer)


@for_each("path", ROUTES)
async def test_a_form_is_that_of_the_answer_behind_the_thinking(
    service: Service, worker: FakeWorker, path: str
) -> None:
    before, *parts = await asked(service, worker, path, f"Hm.\n</think>\n\n{ANSWER}", thinks=True)
    assert "before: thought" in before, "the prompt has begun it"
    assert parts == ["Hm.", ANSWER]
    for said in (f"<think>Hm.</think>{ANSWER}", ANSWER):
        before, *parts = await asked(service, worker, path, said)
        assert 'before: ("<think>" thought' in before
        assert parts == ["Hm." if "think" in said else "", ANSWER]
    before, *parts = await asked(service, worker, path, ANSWER, thinks=False)
    assert (before, parts) == ("", ["", ANSWER]), "the prompt has ended it"
