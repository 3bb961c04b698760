"""``/v1``: OpenAI's shapes, with the official SDK unmodified (OR-3)."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.tasks.job import Message
from protocol import Code
from tests.orchestrator.api.asking import CHAT, TEXT, chunks_of
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.lazy import openai


async def test_chat_with_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "w0 w1 w2 w3 ")
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", "fake")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 4)
    stream = await sdk.chat.completions.create(  # type: ignore[call-overload]
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "w0 w1 w2 w3 "
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_models_with_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["fake"]
    model = await sdk.models.retrieve("fake")
    assert (model.id, model.max_model_len) == ("fake", 512)  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("org/none")


async def test_logprobs_with_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(  # type: ignore[call-overload]
        **CHAT, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    assert content[0].logprob == -0.5 and len(content[0].top_logprobs) == 2
    stream = await sdk.chat.completions.create(  # type: ignore[call-overload]
        **CHAT, logprobs=True, stream=True
    )
    seen = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in seen] == [entry.token for entry in content]
    text = await sdk.completions.create(**TEXT, logprobs=1)  # type: ignore[call-overload]
    logprobs = text.choices[0].logprobs
    assert logprobs.text_offset == [0, 3, 6, 9]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert len(logprobs.top_logprobs) == 4


async def test_logprobs_of_half_a_character_have_its_bytes(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    """Tokens are bytes here: the first of "é" is no text by itself."""
    ids = [*service.orchestrator.models.resolve("fake").encode(" é"), 1]
    prompt = len(service.orchestrator.models.resolve("fake").encode("x"))

    def speak(position: int) -> tuple[int, str]:
        return ids[position - prompt], ""

    worker.plan = lambda submit: Plan(speak=speak)
    asked = {"model": "fake", "max_tokens": 4, "prompt": "x", "logprobs": 1}
    answer = await sdk.completions.create(**asked)  # type: ignore[call-overload]
    named = [" ", r"bytes:\xc3", r"bytes:\xa9", "<|eos|>"]
    assert answer.choices[0].logprobs.tokens == named
    assert answer.choices[0].logprobs.top_logprobs == [{name: -0.5} for name in named]
    prompt = len(service.orchestrator.models.resolve("fake").encode((Message("user", "x"),)))
    asked = {**CHAT, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    answer = await sdk.chat.completions.create(  # type: ignore[call-overload]
        **asked, logprobs=True, top_logprobs=1
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [" ", r"\xc3", r"\xa9", "<|eos|>"]
    assert bytes(b for entry in content for b in entry.bytes) == " é<|eos|>".encode()
    assert [entry.top_logprobs[0].bytes for entry in content] == [e.bytes for e in content]


@for_each(
    ("path", "body", "extra"), [("/v1/chat/completions", CHAT, 1), ("/v1/completions", TEXT, 0)]
)
async def test_lb3_one_event_per_token(
    service: Service, worker: FakeWorker, path: str, body: dict[str, object], extra: int
) -> None:
    """LB-3: also where a frame carries several tokens, some without text."""
    worker.plan = lambda submit: Plan(per_delta=3, text=lambda i: "" if i % 2 else f'"{i}\n"é\\')
    chunks = await chunks_of(service, path, body | {"max_tokens": 10})
    assert len(chunks) == 10 + extra + 1
    texts = [
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert "".join(texts) == "".join("" if i % 2 else f'"{i}\n"é\\' for i in range(10))


async def test_the_sdk_retries_what_may_help_and_nothing_else(
    service: Service, worker: FakeWorker, sdk: openai.AsyncOpenAI
) -> None:
    """503 with ``retry-after-ms`` is tried again, ``x-should-retry: false`` is not."""
    plans = [Plan(refuse=(Code.NO_CAPACITY, "full")), Plan()]
    worker.plan = lambda submit: plans[len(worker.submits) - 1]
    answer = await sdk.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "length"
    assert len(worker.submits) == 2
    plans += [Plan(fail_at=0), Plan()]
    with pytest.raises(openai.APIStatusError):
        await sdk.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert len(worker.submits) == 3


@for_each(
    ("change", "param"),
    [
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"prompt": [7] * 9000}, "prompt"),
    ],
)
async def test_a_context_overflow_is_recognisable(
    service: Service, sdk: openai.AsyncOpenAI, change: dict[str, object], param: str
) -> None:
    """OpenAI's own code for it, which libraries go by."""
    is_text = param == "prompt"
    create = sdk.completions.create if is_text else sdk.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        await create(**(TEXT if is_text else CHAT) | change)  # type: ignore[operator]
    assert caught.value.code == "context_length_exceeded"
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)
    said = caught.value.body
    assert "this model's maximum context length is 512 tokens" in str(said)
    assert isinstance(said, dict) and said["context_tokens"] == 512
    error = await service.refused(400, "/v2/tasks", json={"prompt": "x" * 9000})
    assert error["code"] == "context_overflow"


async def test_completions_tell_the_sampled_token_among_the_most_likely(
    service: Service, worker: FakeWorker
) -> None:
    """As OpenAI and vLLM do: up to ``logprobs`` + 1 of them."""
    worker.plan = lambda submit: Plan(speak=lambda _: (72, "x"), top=[(73, -0.1), (74, -0.2)])
    sampled, *likelier = [
        service.orchestrator.models.resolve("fake").tokens.token(i).text for i in (72, 73, 74)
    ]
    for count in (0, 2):
        answer = await service.ask("POST", "/v1/completions", json=TEXT | {"logprobs": count})
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["top_logprobs"]) == 4
        for top in logprobs["top_logprobs"]:
            assert set(top) == {sampled, *likelier[:count]}
            assert top[sampled] == -0.5


async def test_completions_have_16_tokens_unless_asked(
    service: Service, worker: FakeWorker
) -> None:
    """OpenAI's own default; a chat has the operator's, and a short context shrinks it."""
    for path, body, tokens in (
        ("/v1/completions", TEXT, 16),
        ("/v1/completions", TEXT | {"min_tokens": 20}, 20),
        ("/v1/completions", TEXT | {"prompt": [7] * (512 - 5)}, 5),
        ("/v1/chat/completions", CHAT, 256),
    ):
        body = {**body, "max_tokens": None}
        await service.ask("POST", path, json=body)
        assert worker.submits[-1].sampling.max_tokens == tokens


async def test_how_long_it_took_and_how_many_more_may_wait(
    make_service: MakeService, make_worker: object
) -> None:
    worker = await make_worker(max_running=1)  # type: ignore[operator]
    service = await make_service(worker, queue__max_waiting=3, MOST_BACKLOG=0)
    held = worker.does(Plan(stall_at=0))
    ask = [asyncio.create_task(service.http.post("/v1/chat/completions", json=CHAT))]
    await worker.until(lambda: worker.running == 1)
    ask += [asyncio.create_task(service.http.post("/v1/chat/completions", json=CHAT))]
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    body = CHAT | {"n": 0}
    async with service.http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        assert response.headers["x-ratelimit-limit-requests"] == "3"
        assert response.headers["x-ratelimit-remaining-requests"] == "2"
        assert int(response.headers["openai-processing-ms"]) >= 0
    async with service.http.post("/v2/tasks", json={}) as response:
        assert not any(name.startswith("x-ratelimit") for name in response.headers)
        assert "openai-processing-ms" not in response.headers
    held.release.set()
    for answer in ask:
        async with await answer as response:
            assert response.status == 200
