"""What vLLM's server says beyond OpenAI, as clients of either read it (OR-3)."""

import json
from typing import Any

from protocol import FinishReason
from tests.orchestrator.api.asking import CHAT, TEXT, answer_of, chunks_of
from tests.orchestrator.conftest import Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

BOTH = for_each(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])


@BOTH
async def test_usage_in_every_chunk(service: Service, path: str, body: dict[str, Any]) -> None:
    """guidellm counts tokens by it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await chunks_of(service, path, body | {"stream_options": options})
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == ([0] if body is CHAT else []) + [1, 2, 3, 4, 4]
    prompt = {chunk["usage"]["prompt_tokens"] for chunk in [*chunks, last]}
    assert prompt == {6 if body is CHAT else 2}
    assert all(
        chunk["usage"]["total_tokens"] == made + chunk["usage"]["prompt_tokens"]
        for chunk, made in zip(chunks, made, strict=True)
    )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


@BOTH
async def test_cached_prompt_tokens(
    service: Service, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    worker.plan = lambda submit: Plan(cached=2)
    usage = (await answer_of(service, path, body))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    chunks = await chunks_of(service, path, body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"] == usage


@BOTH
async def test_the_stop_string_that_was_met(
    service: Service, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    worker.does(Plan(text=lambda i: "", reason=FinishReason.STOP, stop="STOPP"))
    asked = body | {"stop": ["TOP", "STOPP"]}
    (choice,) = (await answer_of(service, path, asked))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOPP")
    chunks = await chunks_of(service, path, asked)
    assert chunks[-1]["choices"][0]["stop_reason"] == "STOPP"
    assert all("stop_reason" not in chunk["choices"][0] for chunk in chunks[:-1])
    with_stop = asked | {"include_stop_str_in_output": True}
    (choice,) = (await answer_of(service, path, with_stop))["choices"]
    assert (choice["message"]["content"] if body is CHAT else choice["text"]) == "STOPP"
    (choice,) = (await chunks_of(service, path, with_stop))[-1]["choices"]
    assert (choice["delta"]["content"] if body is CHAT else choice["text"]) == "STOPP"


@BOTH
async def test_token_ids(
    service: Service, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    asked = body | {"return_token_ids": True}
    answer = await answer_of(service, path, asked)
    (choice,) = answer["choices"]
    prompt = worker.submits[-1].token_ids
    assert choice["token_ids"] == [0, 1, 2, 3]
    assert (answer if body is CHAT else choice)["prompt_token_ids"] == prompt
    chunks = await chunks_of(service, path, asked)
    first = chunks[0] if body is CHAT else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == [0, 1, 2, 3]
    answer = await answer_of(service, path, body)
    assert "prompt_token_ids" not in json.dumps(answer) and "token_ids" not in json.dumps(answer)


@BOTH
async def test_tokens_that_end_a_text(
    service: Service, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    worker.plan = lambda submit: Plan(reason=FinishReason.STOP, stop_token_id=72)
    asked = body | {"stop_token_ids": [72, 5], "skip_special_tokens": False}
    (choice,) = (await answer_of(service, path, asked))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 72)
    sampling = worker.submits[-1].sampling
    assert (sampling.stop_token_ids, sampling.skip_special_tokens) == ((72, 5), False)
    last = (await chunks_of(service, path, asked | {"include_stop_str_in_output": True}))[-1]
    assert last["choices"][0]["stop_reason"] == 72
    for ids in ([262], [-1], [5] * 129):
        error = await answer_of(service, path, body | {"stop_token_ids": ids}, status=400)
        assert error["error"]["param"] == "stop_token_ids"
