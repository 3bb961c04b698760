"""Several choices and several prompts in one request: a task for each (OR-3)."""

import asyncio
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from orchestrator.dispatch import time_limits
from protocol import Submit
from tests.orchestrator.api.asking import CHAT, TEXT, answer_of, chunks_of
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan


def by_prompt(submit: Submit) -> Plan:
    """Says its last prompt token, so that answers can be told apart."""
    last = submit.token_ids[-1]
    return Plan(text=lambda i: f"{last}.{i} ")


async def test_n_choices_of_a_chat(service: Service, worker: FakeWorker) -> None:
    answer = await answer_of(service, "/v1/chat/completions", CHAT | {"n": 3, "seed": 7})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"w0 w1 w2 w3 "}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 12)
    assert usage["total_tokens"] == 18
    # A stated seed makes answers repeatable, not equal; one prompt is encoded once.
    assert [submit.sampling.seed for submit in worker.submits] == [7, 8, 9]
    assert len({tuple(submit.token_ids) for submit in worker.submits}) == 1
    assert service.outcomes() == ["met"] * 3


async def test_several_prompts(service: Service, worker: FakeWorker) -> None:
    worker.plan = by_prompt
    body = TEXT | {"prompt": ["a", [73]], "n": 2}
    answer = await answer_of(service, "/v1/completions", body)
    first, second = (worker.submits[at].token_ids[-1] for at in (0, 2))
    assert first != second
    told = [(choice["index"], choice["text"].split(".")[0]) for choice in answer["choices"]]
    assert told == list(enumerate(map(str, (first, first, second, second))))
    # A prompt counts once, however many choices it has.
    assert answer["usage"]["prompt_tokens"] == sum(len(s.token_ids) for s in worker.submits[::2])
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_one_stream_with_an_index(service: Service, worker: FakeWorker, path: str) -> None:
    body = (CHAT if "chat" in path else TEXT) | {"n": 2, "stream_options": {"include_usage": True}}
    events = await chunks_of(service, path, body)
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    assert usage["usage"]["prompt_tokens"] == len(worker.submits[0].token_ids)
    assert len({event["id"] for event in events}) == 1
    texts: dict[int, str] = defaultdict(str)
    finished = []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += (choice.get("delta", {}).get("content") or "") + choice.get(
            "text", ""
        )
        if choice["finish_reason"]:
            finished.append(choice["index"])
            assert "left=" in event["deadline_budget"]
    assert texts == {0: "w0 w1 w2 w3 ", 1: "w0 w1 w2 w3 "}
    assert sorted(finished) == [0, 1]


async def test_one_that_is_refused_takes_the_others_with_it(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, limits__each_key__tokens_per_min=20)
    worker.plan = lambda submit: Plan(stall_at=0)
    for stream in (False, True):
        # Their prompts, which are known by then only, are what is too much.
        body = TEXT | {"n": 3, "stream": stream, "prompt": [7, 7, 7]}
        error = await answer_of(service, "/v1/completions", body, status=429)
        assert error["error"]["code"] == "rate_limited"
        await worker.until(lambda: not worker.running)
        await service.until(lambda: service.orchestrator.live_tasks == 0)
    outcomes = service.outcomes()
    assert outcomes.count("refused") == 2 and "aborted" in outcomes


@pytest.mark.parametrize(
    "limits",
    [
        {"limits__each_key__requests_per_min": 4},
        {"limits__each_key__tokens_per_min": 24},
        {"queue__max_waiting": 0},
    ],
)
async def test_what_never_fits_is_refused_whole(
    make_service: MakeService, make_worker: MakeWorker, limits: dict[str, int]
) -> None:
    """OR-12, OR-4: who sends it again is told the same, so nobody is told to; it costs nothing."""
    worker = await make_worker(max_running=4)
    service = await make_service(worker, **limits)
    path = "/v1/completions"
    for body in ({"n": 5}, {"prompt": ["a"] * 5}, {"n": 5, "stream": True}):
        async with service.http.post(path, json=TEXT | body) as response:
            assert response.status == 429
            assert response.headers["x-should-retry"] == "false"
            assert "Retry-After" not in response.headers
            param = (await response.json())["error"]["param"]
        assert param == ("n" if "n" in body else "prompt")
    assert worker.submits == [] and service.outcomes() == []
    await answer_of(service, path, TEXT | {"n": 4})  # all of the limit is there


async def test_one_that_fails_ends_the_request(service: Service, worker: FakeWorker) -> None:
    for stream in (False, True):
        failing = [Plan(stall_at=0), Plan(fail_at=0)]
        seen = len(worker.submits)
        worker.plan = lambda submit, p=failing, s=seen: p[len(worker.submits) - 1 - s]  # type: ignore[misc]
        body = TEXT | {"n": 2, "stream": stream}
        error = await answer_of(service, "/v1/completions", body, status=502)
        assert error["error"]["code"] == "engine_error"
        await worker.until(lambda: not worker.running)
    await service.until(lambda: len(service.outcomes()) == 4)
    assert sorted(service.outcomes()) == ["aborted"] * 2 + ["failed"] * 2


async def test_nothing_begins_before_all_prompts_are_read(
    service: Service, worker: FakeWorker
) -> None:
    """Its text could not be sent yet, and the last prompt may be one to be refused."""
    for stream in (False, True):
        body = TEXT | {"prompt": [[7], [8], [9] * 100_000], "n": 2, "stream": stream}
        error = await answer_of(service, "/v1/completions", body, status=400)
        assert error["error"]["code"] == "context_length_exceeded"
        await service.until(lambda: service.orchestrator.live_tasks == 0)
    assert worker.submits == []
    assert sorted(service.outcomes()) == ["aborted"] * 4 + ["refused"] * 2


async def test_a_disconnect_while_prompts_are_read(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WP-1: those that were read end too."""
    prepare, reading = service.orchestrator.prepare, asyncio.Event()

    async def slowly(*args: Any, **kwargs: Any) -> Any:
        if service.orchestrator.live_tasks == 2:
            reading.set()
            await asyncio.Event().wait()
        return await prepare(*args, **kwargs)

    monkeypatch.setattr(service.orchestrator, "prepare", slowly)
    body = TEXT | {"prompt": ["a", "b", "c"]}
    client = asyncio.create_task(service.http.post("/v1/completions", json=body))
    await reading.wait()
    client.cancel()
    await service.until(lambda: service.orchestrator.live_tasks == 0)
    assert service.outcomes() == ["aborted"] * 2 and worker.submits == []


async def test_many_choices_leave_the_event_loop_to_others(
    service: Service, worker: FakeWorker
) -> None:
    """Neither their admission nor their end is one long step."""
    worker.plan = lambda submit: Plan(stall_at=0)
    live = [0]

    async def watch() -> None:
        while True:
            live.append(service.orchestrator.live_tasks)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    asking = asyncio.create_task(service.http.post("/v1/completions", json=TEXT | {"n": 40}))
    await service.until(lambda: service.orchestrator.live_tasks == 40)
    asking.cancel()
    await service.until(lambda: service.orchestrator.live_tasks == 0)
    watching.cancel()
    assert max(abs(after - before) for before, after in pairwise(live)) <= 8
    assert service.outcomes() == ["aborted"] * 40


async def test_dl9_an_error_has_the_budget_of_the_choice_that_it_is_about(
    make_service: MakeService, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DL-9: the second waits behind the first all the time, and is what the error is about."""
    worker = await make_worker(max_running=1)
    monkeypatch.setattr(time_limits, "REPORT_GRACE_S", 60.0)
    service = await make_service(worker)
    worker.plan = lambda submit: Plan(stall_at=0, ignores_deadline=True)
    for stream in (False, True):
        body = TEXT | {"n": 2, "stream": stream, "deadline_ms": 20_000}
        asking = asyncio.create_task(service.http.post("/v1/completions", json=body))
        await service.until_tokens(0)
        await service.until(lambda: len(service.orchestrator.queue) == 1)
        service.leap(21)
        async with await asking as response:
            assert response.status == 504
            budget = response.headers["X-Deadline-Budget"]
        parts = dict(part.split("=") for part in budget.split(";"))
        assert float(parts["queue"]) > 15_000, budget
        await worker.until(lambda: not worker.running)


@pytest.mark.parametrize("stream", [False, True])
async def test_wp1_a_disconnect_ends_all(
    service: Service, worker: FakeWorker, stream: bool
) -> None:
    """WP-1."""
    worker.plan = lambda submit: Plan(stall_at=2 if stream else 0)
    body = TEXT | {"n": 3, "stream": stream}
    asking = asyncio.create_task(service.http.post("/v1/completions", json=body))
    await worker.until(lambda: worker.running == 3)
    if stream:
        (await asking).close()
    else:
        asking.cancel()
    await worker.until(lambda: not worker.running)
    await service.until(lambda: len(service.outcomes()) == 3)
    assert service.outcomes() == ["aborted"] * 3


@for_each(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [[7]] * 100_000}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"], "on_disconnect": "continue"}, "on_disconnect"),
        ({"best_of": 2}, "best_of"),
    ],
)
async def test_what_is_refused(service: Service, body: dict[str, object], param: str) -> None:
    error = await answer_of(service, "/v1/completions", TEXT | body, status=400)
    assert (error["error"]["param"], error["error"]["code"]) == (param, "invalid_request")
