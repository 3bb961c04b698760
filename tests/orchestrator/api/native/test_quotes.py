"""``POST /v2/quote`` in front of an instance of a known pace: 10 ms a token for one."""

import asyncio
from typing import Any

import pytest

from orchestrator.prediction import promises
from orchestrator.prediction.quotes import Quote
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.task import Task
from tests.orchestrator.conftest import Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker
from tests.support.jobs import make_job

STATED = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def paced(service: Service) -> Service:
    """Its time stands still but for leaps."""
    service.hold_time()
    service.hold_pace()
    return service


async def ask(
    service: Service, status: int = 200, headers: dict[str, str] | None = None, **body: Any
) -> Any:
    asked = STATED | body
    asked = {name: value for name, value in asked.items() if value is not None}
    answer = await service.ask("POST", "/v2/quote", status, json=asked, headers=headers)
    return answer.get("error", answer)


async def use(service: Service, reservation: Any, **body: Any) -> str | None:
    """Send the request; returns the chance that its answer says it was reserved with."""
    asked, headers = STATED | body, reservation["headers"]
    async with service.http.post("/v1/completions", json=asked, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
        return response.headers.get("X-Deadline-Reserved")


async def test_a_quote_tells_the_chance_by_deadline_and_offers_nothing(
    paced: Service, worker: FakeWorker
) -> None:
    answer = await ask(paced)
    assert (answer["prompt_tokens"], answer["max_tokens"]) == (1, 100)
    curve = answer["curve"]
    assert [point["within_ms"] for point in curve] == sorted(p["within_ms"] for p in curve)
    assert [point["chance"] for point in curve] == sorted(p["chance"] for p in curve)
    assert curve[0]["chance"] < 0.1 and curve[-1]["chance"] > 0.9
    assert curve[0]["within_ms"] < 1000 < curve[-1]["within_ms"]  # 100 tokens at 10 ms
    now_ms = 1000 * paced.clock.unix()
    assert curve[0]["deadline_unix_ms"] == pytest.approx(now_ms + curve[0]["within_ms"], abs=1)
    assert answer["stated"] is answer["reservation"] is None
    assert [one["chance"] for one in answer["earliest"]] == [0.5, 0.9, 0.99]
    within = [one["within_ms"] for one in answer["earliest"]]
    assert within == sorted(within) and within[0] > 900
    assert worker.submits == [] and paced.outcomes() == []
    assert paced.metric("tidegate_quotes_total") == 1
    assert paced.orchestrator.live_tasks == 0


@for_each(("deadline_ms", "least", "most"), [(200, 0, 0.1), (5000, 0.9, 1)])
async def test_a_stated_deadline_has_its_own_chance(
    paced: Service, deadline_ms: float, least: float, most: float
) -> None:
    stated = (await ask(paced, deadline_ms=deadline_ms))["stated"]
    assert least <= stated["chance"] <= most
    assert stated["within_ms"] == pytest.approx(deadline_ms)


async def test_an_outline_is_quoted_as_a_prompt_of_its_length(paced: Service) -> None:
    short = await ask(paced, prompt=None, prompt_tokens=1)
    long = await ask(paced, prompt=None, prompt_tokens=400)
    assert long["prompt_tokens"] == 400
    for one, other in zip(short["earliest"], long["earliest"], strict=True):
        assert other["within_ms"] > one["within_ms"] + 20


async def test_a_reserved_deadline_is_kept_for_the_request_that_states_it(paced: Service) -> None:
    reservation = (await ask(paced, accept=0.99))["reservation"]
    assert reservation["chance"] == 0.99
    promises = paced.orchestrator.stages.prediction.promises
    assert promises.wait_ms() > 0  # nothing else that is promised gets this time
    assert await use(paced, reservation) == "0.99"
    assert promises.wait_ms() == 0
    assert await use(paced, reservation) is None  # it is good for one request
    assert paced.outcomes() == ["met", "met"]
    assert paced.metric("tidegate_reservations_total", chance="99") == 1
    assert paced.metric("tidegate_reservations_ended_total", chance="99", result="kept") == 1


async def test_a_larger_request_is_served_as_any_other(paced: Service) -> None:
    reservation = (await ask(paced, accept=0.9))["reservation"]
    assert await use(paced, reservation, max_tokens=101) is None
    assert await use(paced, reservation, max_tokens=50) == "0.9"


async def test_a_reservation_that_nobody_uses_is_void(paced: Service) -> None:
    reservation = (await ask(paced, accept=0.9, hold_ms=200))["reservation"]
    paced.leap(0.6)
    assert paced.orchestrator.stages.prediction.promises.wait_ms() == 0
    # It is one of many now, and too late for that.
    response = await paced.http.post("/v1/completions", json=STATED, headers=reservation["headers"])
    assert response.status == 504


async def test_another_tenant_has_no_use_of_a_reservation(paced: Service) -> None:
    reservation = (await ask(paced, accept=0.99, tenant="a"))["reservation"]
    assert await use(paced, reservation, tenant="b") is None
    assert await use(paced, reservation, tenant="a") == "0.99"


async def test_reservations_wait_for_one_another_and_are_bounded(
    paced: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "MAX_HELD", 43)  # of which one alone has three quarters
    within = []
    for _ in range(32):
        reservation = (await ask(paced, accept=0.5, hold_ms=1000))["reservation"]
        within.append(reservation["within_ms"])
    assert within == sorted(within) and within[-1] > 2 * within[0]
    error = await ask(paced, 429, accept=0.5)
    assert "32 of them" in error["message"]
    await ask(paced)  # a quote alone takes nothing
    paced.leap(1.1)
    assert (await ask(paced, accept=0.5))["reservation"]["within_ms"] == pytest.approx(within[0])


async def test_or24_reservations_of_one_tenant_put_no_other_off(paced: Service) -> None:
    async def earliest(tenant: str, **body: object) -> list[float]:
        return [one["within_ms"] for one in (await ask(paced, tenant=tenant, **body))["earliest"]]

    alone = await earliest("calm")
    for _ in range(32):
        await ask(paced, accept=0.99, tenant="loud")
    beside = await earliest("calm")
    # As long as one reservation of the other tenant takes in half of the capacity, at most.
    assert all(after < 4 * before for before, after in zip(alone, beside, strict=True))
    assert (await earliest("loud"))[0] > 2 * beside[0]
    held = [await earliest("calm", accept=0.5) for _ in range(4)]
    assert [each[0] for each in held] == sorted(each[0] for each in held)


@for_each(
    ("body", "field"),
    [
        ({"accept": 0.8}, "accept"),
        ({"accept": 0.9, "hold_ms": 0}, "hold_ms"),
        ({"accept": 0.9, "hold_ms": 31_000}, "hold_ms"),
        ({"prompt_tokens": 5}, "prompt_tokens"),
        ({"prompt": None}, "prompt"),
        ({"prompt": None, "prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt": None, "prompt_tokens": 10**9}, "prompt"),
    ],
)
async def test_what_cannot_be_quoted_is_refused_by_name(
    paced: Service, body: dict[str, Any], field: str
) -> None:
    error = await ask(paced, 400, **body)
    assert field in error["message"]


async def test_or24_tenants_take_turns_with_quotes(
    paced: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotes, turns = paced.orchestrator.stages.prediction.quotes, list[str]()
    quote = quotes.quote

    def noted(task: Task) -> Quote:
        turns.append(task.job.tenant)
        return quote(task)

    monkeypatch.setattr(quotes, "quote", noted)
    questions, deadline = paced.orchestrator.questions, Deadline(paced.clock.now() + 10.0, 0)
    await asyncio.gather(
        *(
            questions.quote(make_job(tenant=tenant, deadline=deadline, model="fake"), None, 1)
            for tenant in ("many", "many", "many", "one")
        )
    )
    assert turns == ["many", "one", "many", "many"]
