"""DL-25 with OR-18: orchestrators that share a store add up what keys and runs have spent."""

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.budgets.extension import BudgetRoom
from orchestrator.state import exchange
from orchestrator.state.members import Member, Members, SeenMember
from tests.orchestrator.conftest import Service
from tests.orchestrator.state.conftest import Sharing
from tests.support.fake_worker import FakeWorker
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
    for service in (one, two):
        (spent,) = (await service.ask("GET", "/v2/budget?by=run,outcome"))["spent"]
        assert spent["run"] == "a-trip" and spent["outcome"] == "met"
        assert (spent["requests"], spent["completion_tokens"]) == (2, 2 * ASK["max_tokens"])
    await complete(one)
    three = await member()
    assert await left(three) >= 2 * COST
    budgets = room(three.orchestrator, BudgetRoom).budgets
    await three.until(lambda: {each.others[0] for each in budgets._shared.values()} == {3 * COST})
    assert await left(three) == 2 * COST


def test_each_port_is_asked_for_its_books_once() -> None:
    """Not the own one, and not a predecessor that has an address until its lease is over."""
    others = {
        "own-sibling": SeenMember(Member("http://own-2", "k", group="own"), True),
        "own-predecessor": SeenMember(Member("http://own-1", "k"), True),
        "alone": SeenMember(Member("http://alone", "k"), True),
        "alone-before": SeenMember(Member("http://alone", "k"), True),
        "pair-1": SeenMember(Member("http://pair-1", "k", group="pair"), True),
        "pair-2": SeenMember(Member("http://pair-2", "k", group="pair"), True),
        "dead": SeenMember(Member("http://dead", "k"), False),
    }
    members: Any = SimpleNamespace(others=others, group="own", url="http://own-1")
    assert sorted(Members.other_ports(members)) == ["http://alone", "http://pair-2"]
