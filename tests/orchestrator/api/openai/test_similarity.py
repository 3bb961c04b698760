"""Scores and rankings: cosines of embeddings in vLLM's, Jina's and Cohere's shapes."""

import asyncio
from typing import Any

import pytest

from orchestrator.api.http.ignored import IGNORED_HEADER
from tests.orchestrator.api.openai.asking import answer_of
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from worker.protocol import Code, Pooling, Submit

SCORES = ("/score", "/v1/score")
RANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
VECTORS = {1: (1.0, 0.0), 2: (0.6, 0.8), 3: (0.0, -1.0), 4: (-1.0, 0.0)}
"""The embedding of a text, by its length in tokens: its cosine with one of a single token is the
first number. The fake model has a token for each byte."""
SCORE = {"model": "fake", "text_1": "q", "text_2": ["abc", "ab", "a", "abcd"]}
RANK = {"model": "fake", "query": "q", "documents": ["abc", "ab", {"text": "a"}, "abcd"]}


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    worker = await make_worker(pooling=Pooling.LAST)
    worker.plan = _plan
    return worker


def _plan(submit: Submit) -> Plan:
    return Plan(vector=VECTORS[len(submit.token_ids)])


@pytest.mark.parametrize("path", SCORES)
async def test_one_text_with_several(service: Service, worker: FakeWorker, path: str) -> None:
    answer = await answer_of(service, path, SCORE)
    assert answer["id"].startswith("score-") and answer["object"] == "list"
    assert answer["model"] == "fake" and answer["created"]
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (index, "score") for index in range(4)
    ]
    assert [one["score"] for one in answer["data"]] == pytest.approx([0, 0.6, 1, -1])
    assert answer["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    assert all(submit.embeds for submit in worker.submits) and len(worker.submits) == 5
    assert service.outcomes() == ["met"] * 5


@for_each(
    ("sides", "scores"),
    [
        ({"text_1": "a", "text_2": "ab"}, [0.6]),
        ({"text_1": ["a", "abc"], "text_2": ["ab", "ab"]}, [0.6, -0.8]),
        ({"queries": "a", "documents": ["ab", {"text": "a"}]}, [0.6, 1.0]),
        ({"queries": ["ab"], "items": ["ab"]}, [1.0]),
        ({"data_1": ["a"], "data_2": "abcd"}, [-1.0]),
    ],
)
async def test_in_all_spellings(
    service: Service, sides: dict[str, Any], scores: list[float]
) -> None:
    answer = await answer_of(service, "/v1/score", {"model": "fake"} | sides)
    assert [one["score"] for one in answer["data"]] == pytest.approx(scores)


@pytest.mark.parametrize("path", RANKS)
async def test_documents_are_ranked(service: Service, path: str) -> None:
    answer = await answer_of(service, path, RANK)
    assert answer["id"].startswith("rerank-") and answer["model"] == "fake"
    assert [one["index"] for one in answer["results"]] == [2, 1, 0, 3]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == pytest.approx([1, 0.6, 0, -1])
    texts = [one["document"]["text"] for one in answer["results"]]
    assert texts == ["a", "ab", "abc", "abcd"]
    assert answer["usage"] == {"prompt_tokens": 11, "total_tokens": 11}


async def test_the_best_alone_and_without_their_texts(service: Service) -> None:
    answer = await answer_of(service, "/v1/rerank", RANK | {"top_n": 2, "return_documents": False})
    assert [one["index"] for one in answer["results"]] == [2, 1]
    assert all(set(one) == {"index", "relevance_score"} for one in answer["results"])
    for top_n in (0, None, 99):
        answer = await answer_of(service, "/v1/rerank", RANK | {"top_n": top_n})
        assert len(answer["results"]) == 4


async def test_a_vector_without_direction_is_like_nothing(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(vector=(0.0, 0.0))
    answer = await answer_of(service, "/v1/score", SCORE)
    assert [one["score"] for one in answer["data"]] == [0.0] * 4


async def test_what_other_services_take_is_passed_over_and_named(service: Service) -> None:
    body = RANK | {
        "documents": [{"text": "a", "title": "t"}, {"text": "ab", "title": "t"}],
        "max_tokens_per_doc": 4096,
        "rank_fields": ["text"],
        "use_activation": True,
        "priority": 0,
    }
    async with service.http.post("/v2/rerank", json=body) as response:
        assert response.status == 200, await response.text()
        told = response.headers[IGNORED_HEADER].split(", ")
    assert sorted(told) == ["documents[].title", "max_tokens_per_doc", "use_activation"]


@for_each(
    ("path", "change", "field"),
    [
        ("/v1/score", {"text_2": None}, "text_1"),
        ("/v1/score", {"text_1": None}, "text_1"),
        ("/v1/score", {"queries": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_2": ["a", 7]}, "text_2[1]"),
        ("/v1/score", {"text_2": []}, "text_2"),
        ("/v1/score", {"text_2": ["a"] * 129}, "text_2"),
        ("/v1/score", {"text_2": {"content": [{"type": "image_url"}]}}, "text_2"),
        ("/v1/score", {"max_tokens": 4}, "max_tokens"),
        ("/v1/rerank", {"query": ""}, "query"),
        ("/v1/rerank", {"query": ["a"]}, "query"),
        ("/v1/rerank", {"documents": ["a", ""]}, "documents[1]"),
        ("/v1/rerank", {"documents": ["a", "b" * 9000]}, "documents[1]"),
        ("/v1/rerank", {"documents": [{"image": "x"}]}, "documents[0]"),
        ("/v1/rerank", {"documents": "[" * 2000 + "]" * 2000}, "documents"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v1/rerank", {"rank_fields": ["title"]}, "rank_fields"),
        ("/v1/rerank", {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ],
)
async def test_what_is_refused(
    service: Service, worker: FakeWorker, path: str, change: dict[str, Any], field: str
) -> None:
    body = (SCORE if "score" in path else RANK) | change
    error = (await answer_of(service, path, body, status=400))["error"]
    assert error["param"] == field and error["message"]
    assert not worker.submits


@pytest.mark.parametrize(("path", "body"), [("/score", SCORE), ("/v2/rerank", RANK)])
async def test_a_model_without_embeddings_is_named(
    make_worker: MakeWorker, make_service: MakeService, path: str, body: dict[str, Any]
) -> None:
    service = await make_service(await make_worker())
    error = (await answer_of(service, path, body, status=400))["error"]
    assert error["param"] == "model" and "'fake' makes no embeddings" in error["message"]


async def test_a_deadline_ends_all(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(refuse=(Code.DEADLINE_EXCEEDED, "too late"))
    for path, body in (("/v1/score", SCORE), ("/v2/rerank", RANK)):
        error = (await answer_of(service, path, body, status=504))["error"]
        assert error["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("path", "body"), [("/v1/score", SCORE), ("/rerank", RANK)])
async def test_keys_hold(
    make_worker: MakeWorker, make_service: MakeService, path: str, body: dict[str, Any]
) -> None:
    service = await make_service(
        await make_worker(pooling=Pooling.LAST), keys={"one": {"token": "t0k3n-of-a-client"}}
    )
    await answer_of(service, path, body, status=401)


async def test_its_id_ends_all_of_its_tasks(service: Service, worker: FakeWorker) -> None:
    """By the name that ``/v2/tasks`` shows while it runs."""
    begin = asyncio.Event()
    worker.plan = lambda submit: Plan(begin=begin)
    asked = asyncio.create_task(answer_of(service, "/v1/rerank", RANK, status=499))
    await service.until(lambda: len(worker.submits) == 5)
    async with service.http.get("/v2/tasks") as response:
        shown = {one["answer_id"] for one in (await response.json())["tasks"]}
    (name,) = shown
    assert name.startswith("rerank-")
    async with service.http.post(f"/v2/tasks/{name}/cancel") as response:
        assert len((await response.json())["task_ids"]) == 5
    await asked
    assert service.outcomes() == ["aborted"] * 5
