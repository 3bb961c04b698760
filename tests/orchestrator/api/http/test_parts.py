"""DL-14 over HTTP: deadlines for the first token and for the gap between tokens."""

import logging
from typing import Any

import pytest

from orchestrator.telemetry.log import access_log
from tests.orchestrator.api.asking import BODIES, CHAT, TEXT, chunks_of
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker, Plan

SLOW = Plan(step_s=0.02)
"""Tokens 20 ms apart: 1 ms is missed for certain, a minute is not."""


async def run(
    service: Service, body: dict[str, Any], leap: tuple[int, float] | None = None, **headers: str
) -> dict[str, Any]:
    """A native task to its end; its terminal event. ``leap``: at so many tokens so many seconds
    pass at once."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    task = await service.ask("POST", "/v2/tasks", 202, json=TEXT | body, headers=named)
    if leap is not None:
        tokens, seconds = leap
        await service.until_tokens(tokens)
        service.leap(seconds)
    events = await service.follow(task["events_url"])
    last = events[-1].json() | {"kind": events[-1].event, "task_id": task["task_id"]}
    last["tokens"] = sum(event.event == "token" for event in events)
    return last


@pytest.mark.parametrize("path", BODIES)
async def test_dl14_the_budgets_travel_to_the_worker(
    service: Service, worker: FakeWorker, path: str
) -> None:
    body = BODIES[path] | {"first_token_ms": 50_000, "token_gap_ms": 70}
    for headers in ({}, {"X-First-Token-Timeout-Ms": "20000", "x-llm-d-slo-tpot-ms": "30"}):
        await service.ask("POST", path, 200, 202, json=body, headers=headers)
    await service.until(lambda: len(service.outcomes()) == 2)
    assert [submit.token_gap_ms for submit in worker.submits] == [70, 30]
    budgets = [submit.first_token_budget_ms or 0.0 for submit in worker.submits]
    assert 40_000 < budgets[0] <= 50_000 and 10_000 < budgets[1] <= 20_000
    await service.ask("POST", path, 200, 202, json=BODIES[path])
    await service.until(lambda: len(service.outcomes()) == 3)
    assert worker.submits[2].first_token_budget_ms is worker.submits[2].token_gap_ms is None


async def test_dl14_a_missed_gap_is_said_and_stops_nothing(
    service: Service, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.plan = lambda submit: SLOW
    body = {"token_gap_ms": 1}
    with caplog.at_level(logging.INFO, access_log.name):
        end = await run(service, body)
    logged = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [fields["missed_part"] for fields in logged if "outcome" in fields] == ["token_gap"]
    assert (end["kind"], end["outcome"], end["finish_reason"]) == ("end", "missed", "length")
    assert (end["missed_part"], end["tokens"]) == ("token_gap", 4)
    async with service.http.get(f"/v2/tasks/{end['task_id']}") as response:
        status = await response.json()
        assert response.headers["X-Deadline-Missed-Part"] == "token_gap"
    assert (status["outcome"], status["missed_part"]) == ("missed", "token_gap")
    assert status["text"] == "w0 w1 w2 w3 " and "error" not in status

    for path in ("/v1/chat/completions", "/v1/completions"):
        asked = BODIES[path] | body
        async with service.http.post(path, json=asked) as response:
            answer = await response.json()
            assert response.headers["X-Deadline-Missed-Part"] == "token_gap"
        assert response.status == 200
        assert answer["missed_part"] == "token_gap"
        assert answer["usage"]["completion_tokens"] == 4
        last = (await chunks_of(service, path, asked))[-1]
        assert last["missed_part"] == "token_gap" and "left=" in last["deadline_budget"]
    assert service.outcomes() == ["missed"] * 5
    assert service.metric("tidegate_missed_parts_total", part="token_gap") == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_dl14_no_first_token_in_time_ends_the_task(
    service: Service, worker: FakeWorker, stream: bool
) -> None:
    """While it runs; the whole deadline is far away."""
    worker.plan = lambda submit: Plan(stall_at=0)
    body = CHAT | {"stream": stream, "first_token_ms": 20_000}
    path = "/v1/chat/completions"
    async with service.leaping(21, tokens=0), service.http.post(path, json=body) as response:
        error = (await response.json())["error"]
    assert response.status == 504
    assert (error["code"], error["part"]) == ("deadline_exceeded", "first_token")
    assert "first token" in error["message"]
    assert float(response.headers["X-Deadline-Exceeded-By-Ms"]) >= 0
    assert response.headers["X-Deadline-Missed-Part"] == "first_token"
    assert response.headers["x-should-retry"] == "false"
    assert service.outcomes() == ["missed"]
    assert service.metric("tidegate_missed_parts_total", part="first_token") == 1
    await worker.until(lambda: not worker.running)


async def test_dl14_a_first_token_in_time_lifts_its_deadline_but_not_the_other(
    service: Service, worker: FakeWorker
) -> None:
    plan = worker.does(Plan(stall_at=1))
    asked = TEXT | {"first_token_ms": 20_000}
    task = await service.ask("POST", "/v2/tasks", 202, json=asked)
    await service.until_tokens(1)
    service.leap(21)
    plan.release.set()
    assert (await service.follow(task["events_url"]))[-1].event == "end"
    plan.release.clear()
    body = {"first_token_ms": 20_000, "deadline_ms": 40_000}
    assert (await run(service, body, leap=(1, 41)))["missed_part"] == "whole"
    assert service.outcomes() == ["met", "missed"]


async def test_dl14_an_slo_is_a_wish_and_does_not_cut(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: SLOW
    end = await run(service, {}, x_llm_d_slo_ttft_ms="5")
    assert (end["kind"], end["outcome"], end["missed_part"]) == ("end", "missed", "first_token")
    assert end["tokens"] == 4
    # With a timeout as well, that is what cuts, and the wish is what is judged.
    end = await run(service, {"first_token_ms": 60_000}, x_llm_d_slo_ttft_ms="5")
    assert (end["kind"], end["missed_part"], end["tokens"]) == ("end", "first_token", 4)
    worker.plan = lambda submit: Plan(stall_at=0)
    asked = {"first_token_ms": 20_000}
    end = await run(service, asked, leap=(0, 21), x_llm_d_slo_ttft_ms="5")
    assert (end["kind"], end["part"]) == ("error", "first_token")


async def test_dl14_a_part_under_the_floor_is_refused_at_once(
    service: Service, worker: FakeWorker
) -> None:
    async with service.http.post("/v1/completions", json=TEXT | {"first_token_ms": 5}) as response:
        assert response.status == 504
        assert (await response.json())["error"]["part"] == "first_token"
        assert "X-Deadline-Missed-Part" not in response.headers
    assert service.outcomes() == ["refused"] and worker.submits == []
