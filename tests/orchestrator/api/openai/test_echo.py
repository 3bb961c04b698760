"""``echo``: what a completion tells of its prompt, as lm-eval reads it."""

from typing import Any

import pytest

from orchestrator.api.openai import echo
from tests.orchestrator.api.asking import TEXT, answer_of, chunks_of
from tests.orchestrator.conftest import Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

PATH = "/v1/completions"


async def choice_of(service: Service, **changes: object) -> Any:
    answer = await answer_of(service, PATH, TEXT | changes)
    return answer["choices"][0]


async def test_as_lm_eval_asks(service: Service, worker: FakeWorker) -> None:
    """Several prompts as ids, one token, and a logprob for each but the first."""
    body = TEXT | {
        "prompt": [[72, 73, 74, 75], [80, 81]],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = await answer_of(service, PATH, body)
    for choice, length in zip(answer["choices"], (4, 2), strict=True):
        logprobs = choice["logprobs"]
        assert [len(logprobs[name]) for name in logprobs] == [length + 1] * 4
        assert logprobs["token_logprobs"] == [None, *[-float(i) for i in range(1, length)], -0.5]
        assert logprobs["top_logprobs"][0] is None
        read = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        for own, top in list(read)[1:length]:
            assert {own, -0.25} == set(top.values())
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] == len(choice["text"]) - len("w0 ")
    assert answer["usage"]["completion_tokens"] == 2
    assert [submit.sampling.prompt_logprobs for submit in worker.submits] == [1, 1]


async def test_nothing_need_be_generated(service: Service, worker: FakeWorker) -> None:
    choice = await choice_of(service, echo=True, logprobs=2, max_tokens=0)
    assert choice["text"] == "hi" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [3]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    plain = await choice_of(service, echo=True, max_tokens=0)
    assert (plain["text"], plain["logprobs"]) == ("hi", None)
    assert {submit.sampling.max_tokens for submit in worker.submits} == {0}
    one = await choice_of(service, echo=True, max_tokens=0, logprobs=0, prompt=[72])
    assert one["logprobs"]["token_logprobs"] == [None]


async def test_a_stream_begins_with_it(service: Service) -> None:
    body = TEXT | {"echo": True, "logprobs": 1}

    async def choices_of(**more: object) -> list[Any]:
        return [chunk["choices"][0] for chunk in await chunks_of(service, PATH, body | more)]

    prompt, last = await choices_of(max_tokens=0)
    assert (prompt["text"], last["finish_reason"]) == ("hi", "length")
    chunks = await choices_of(max_tokens=1, n=2)
    for index in (0, 1):
        prompt, token, last = [chunk for chunk in chunks if chunk["index"] == index]
        assert (prompt["text"], token["text"], last["text"]) == ("hi", "w0 ", "")
        assert prompt["logprobs"]["token_logprobs"] == [None, -1.0]
        assert token["logprobs"]["text_offset"] == [2]


@for_each(
    ("changes", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "on_deadline": "partial"}, "on_deadline"),
    ],
)
async def test_what_is_refused(service: Service, changes: dict[str, Any], field: str) -> None:
    answer = await answer_of(service, PATH, TEXT | changes, status=400)
    assert answer["error"]["param"] == field


async def test_an_answer_repeats_so_many_tokens(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise 128 choices look up a context of ids each, and the event loop does nothing else."""
    monkeypatch.setattr(echo, "MAX_NUMBERS", 8)
    monkeypatch.setattr(echo, "MAX_STREAMED_NUMBERS", 4)
    monkeypatch.setattr(echo, "_TOKENS_AT_ONCE", 2)
    one = {"prompt": [72, 73, 74, 75], "echo": True}
    answer = await answer_of(service, PATH, TEXT | one | {"n": 2})
    assert [choice["text"] for choice in answer["choices"]] == ["cdefw0 w1 w2 w3 "] * 2
    two = {"prompt": [[70, 71], [72, 73]], "echo": True, "logprobs": 1}
    await answer_of(service, PATH, TEXT | two)
    for asked, field in (
        (one | {"n": 3}, "echo"),
        (one | {"n": 2, "stream": True}, "echo"),
        (two | {"logprobs": 2}, "prompt"),
        (two | {"n": 2}, "prompt"),
    ):
        answer = await answer_of(service, PATH, TEXT | asked, status=400)
        assert answer["error"]["param"] == field and "at most" in answer["error"]["message"]
