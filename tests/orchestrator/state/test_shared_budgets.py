"""DL-25 with OR-18: orchestrators that share a store add up what keys and runs have spent."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.budgets import extension
from orchestrator.budgets.books import Amount, BookEntry, Books, month_of
from orchestrator.budgets.extension import BudgetRoom
from orchestrator.state import exchange
from tests.orchestrator.conftest import OPERATOR, Service
from tests.orchestrator.state.conftest import Sharing, freeze
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.rooms import room

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}
COST = 10
"""Tokens of that prompt and its answer."""


async def complete(service: Service, status: int = 200, **body: object) -> Any:
    return await service.ask("POST", "/v1/completions", status, json=ASK | body)


async def left(service: Service) -> Any:
    return (await service.ask("GET", "/v2/budget"))["tokens_left"]


async def test_a_key_and_a_run_have_one_budget_at_all_members(
    sharing: Sharing, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that joins late hears of it, and an amount that is told again and again counts once."""
    monkeypatch.setattr(exchange, "EVERY_S", 0.0)
    month = {"budgets": {"each_key": {"tokens": 5 * COST}}}
    run = {"session_id": "a-trip", "max_run_tokens": 2 * COST + 3}

    async def member() -> Service:
        service = await sharing.member(worker, **month)
        budgets = room(service.orchestrator, BudgetRoom).budgets
        await service.until(lambda: budgets.books.is_open)
        return service

    one, two = await member(), await member()
    await complete(one, **run)
    await complete(two, **run)
    budgets = room(one.orchestrator, BudgetRoom).budgets
    await one.until(lambda: {each.others[0] for each in budgets._shared.values()} == {COST})
    refused = await complete(one, 429, **run)
    assert refused["error"]["tokens_left"] == 3 and "this run" in refused["error"]["message"]
    assert await left(one) == 3 * COST
    await complete(one)
    three = await member()
    assert await left(three) >= 2 * COST
    budgets = room(three.orchestrator, BudgetRoom).budgets
    await three.until(lambda: {each.others[0] for each in budgets._shared.values()} == {3 * COST})
    assert await left(three) == 2 * COST


async def told(service: Service, by: str = "outcome", **wanted: tuple[int, int]) -> Any:
    """Wait until the books have those requests and answered tokens, for an operator, too; returns
    their answer."""
    while True:
        everybodys = await service.ask("GET", f"/v2/budget?by={by}", headers=OPERATOR)
        answer = await service.ask("GET", f"/v2/budget?by={by}")
        found = {one[by]: (one["requests"], one["completion_tokens"]) for one in answer["spent"]}
        if found == wanted and answer["spent"] == everybodys["spent"]:
            return answer


async def test_all_have_the_books_of_all(
    sharing: Sharing, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was aborted at one is in the other's answer, whatever becomes of it. While the store is
    away each tells its own, and that it does; afterwards nothing counts twice."""
    monkeypatch.setattr(extension, "FLUSH_S", 0.0)
    file = {"journal__path": str(tmp_path / "tasks.db")}
    one, two = await sharing.member(worker, **file), await sharing.member(worker)
    for service in (one, two):
        budgets = room(service.orchestrator, BudgetRoom).budgets
        await service.until(lambda budgets=budgets: budgets.books.is_open)  # type: ignore[misc]
    worker.plan = lambda submit: Plan(stall_at=3)
    stream = ASK | {"stream": True, "session_id": "trip"}
    async with one.http.post("/v1/completions", json=stream) as response:
        await response.content.readline()
        await one.until_tokens(3)
    worker.plan = lambda submit: Plan()
    assert (await told(two, aborted=(1, 3)))["fault"] is None
    await told(two, "run", trip=(1, 3))
    await sharing.store.kill()
    await complete(two)
    alone = await told(two, met=(1, 5))
    assert "only from this orchestrator: the store cannot be reached" in alone["fault"]
    await sharing.store.start()
    for service in (one, two):
        assert (await told(service, aborted=(1, 3), met=(1, 5)))["fault"] is None
    async with sharing.store.client() as client:
        await client.flushall()
    await told(two, aborted=(1, 3), met=(1, 5))
    freeze(one)
    await room(one.orchestrator, BudgetRoom).budgets.books.close()
    successor = Books(tmp_path / "tasks.books", one.clock.unix(), two.orchestrator.sharing)
    await successor.open()
    entry = BookEntry(month_of(one.clock.unix()), "", "", "fake", "aborted")
    successor.enter(entry, Amount(1, 5, 0, 7))
    await successor.close()
    await told(two, aborted=(2, 10), met=(1, 5))
