"""``/v1/embeddings``: a task per input, vectors as numbers or bytes."""

import struct
from base64 import b64decode
from typing import Any

import pytest

from protocol import Code, Pooling
from tests.orchestrator.api.openai.asking import answer_of
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

PATH = "/v1/embeddings"
BODY = {"model": "fake", "input": "hi"}


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(pooling=Pooling.LAST)


@pytest.mark.parametrize(
    ("asked", "prompts"),
    [("hi", [2]), (["hi", "you"], [2, 3]), ([70, 71, 72, 73], [4]), ([[70], [71, 72]], [1, 2])],
)
async def test_each_input_has_a_vector(
    service: Service, worker: FakeWorker, asked: object, prompts: list[int]
) -> None:
    answer = await answer_of(service, PATH, BODY | {"input": asked})
    assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
    for one in answer["data"]:
        assert one["embedding"] == pytest.approx([0.6, -0.8])
    assert answer["usage"] == {"prompt_tokens": sum(prompts), "total_tokens": sum(prompts)}
    assert [len(submit.token_ids) for submit in worker.submits] == prompts
    assert all(submit.embeds for submit in worker.submits)
    assert service.outcomes() == ["met"] * len(prompts)
    answer = await answer_of(service, PATH, BODY | {"encoding_format": "base64"})
    data = b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<2f", data) == pytest.approx((0.6, -0.8))


@for_each(
    ("changes", "field"),
    [
        ({"dimensions": 2}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 7]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 129}, "input"),
        ({"input": [262]}, "input"),
        ({"on_deadline": "partial"}, "on_deadline"),
        ({"on_disconnect": "continue"}, "on_disconnect"),
    ],
)
async def test_what_is_refused(
    service: Service, worker: FakeWorker, changes: dict[str, Any], field: str
) -> None:
    error = (await answer_of(service, PATH, BODY | changes, status=400))["error"]
    assert error["param"] == field and error["message"]
    assert not worker.submits


async def test_a_deadline_and_a_failure_end_all(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(refuse=(Code.DEADLINE_EXCEEDED, "too late"))
    await answer_of(service, PATH, BODY | {"input": ["a", "b"]}, status=504)
    worker.plan = lambda submit: Plan(refuse=(Code.ENGINE_ERROR, "broken"))
    error = (await answer_of(service, PATH, BODY, status=502))["error"]
    assert error["code"] == "engine_error"


async def test_a_worker_without_a_model_makes_none(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    service = await make_service(await make_worker())
    error = await answer_of(service, PATH, BODY, status=400)
    assert error["error"]["param"] == "model"
