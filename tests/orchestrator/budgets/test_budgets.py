"""DL-25: tokens and money are budgets like time, and the books have what was spent on what."""

import asyncio
import sqlite3
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from orchestrator.budgets.books import Amount, BookEntry, Books, month_ends, month_of
from orchestrator.budgets.extension import BudgetRoom
from orchestrator.settings import InvalidSettings, load_settings
from orchestrator.sharing import Sharing
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.rooms import room

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}
PROMPT = 5
"""Tokens of that prompt."""
KEYS = {"alice": {"token": "alice-token"}, "bob": {"token": "bob-token"}}
NOON = 1_780_315_200.0
"""2026-06-01 12:00 UTC."""


async def started(make: MakeService, worker: FakeWorker, **settings: object) -> Service:
    service = await make(worker, **settings)
    await service.until(lambda: room(service.orchestrator, BudgetRoom).budgets.books.is_open)
    return service


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-token"}


async def complete(service: Service, status: int = 200, key: str = "", **body: object) -> Any:
    headers = bearer(key) if key else {}
    sent = ASK | body
    return await service.ask("POST", "/v1/completions", status, json=sent, headers=headers)


async def budget(service: Service, key: str = "", query: str = "") -> Any:
    headers = bearer(key) if key else {}
    return await service.ask("GET", f"/v2/budget{query}", headers=headers)


async def test_a_month_of_a_key(worker: FakeWorker, make_service: MakeService) -> None:
    """What is refused is told what is left, what others may spend is theirs, and a request that
    does not say how much it may generate gets what is left."""
    service = await started(
        make_service, worker, keys=KEYS, budgets={"keys": {"alice": {"tokens": 10 + 2 * PROMPT}}}
    )
    tokens = (await complete(service, key="alice"))["usage"]["total_tokens"]
    assert tokens == PROMPT + 5
    async with service.http.post(
        "/v1/completions", json=ASK | {"max_tokens": 6}, headers=bearer("alice")
    ) as response:
        error = (await response.json())["error"]
        assert response.status == 429 and response.headers["x-should-retry"] == "false"
        assert response.headers["x-ratelimit-limit-tokens-month"] == "20"
        assert response.headers["x-ratelimit-remaining-tokens-month"] == "10"
    assert error["code"] == "rate_limited" and error["tokens_left"] == 10
    assert error["resets_unix_ms"] > 1000 * service.clock.unix()
    assert "11 tokens, but only 10 of 20 are left for this key in this month" in error["message"]
    chat = {"model": "fake", "prompt": "hello", "ignore_eos": True}
    answer = await service.ask("POST", "/v2/tasks", 202, json=chat, headers=bearer("alice"))
    await service.until(lambda: len(service.ends) == 3)
    assert worker.submits[-1].sampling.max_tokens == 5, answer
    assert (await budget(service, "alice"))["tokens_left"] == 0
    await complete(service, key="bob")
    assert (await budget(service, "bob"))["tokens_limit"] is None
    budgets = room(service.orchestrator, BudgetRoom).budgets
    assert len(budgets._of_keys) == 2
    service.leap(32 * 86_400.0)
    assert (await budget(service, "alice"))["tokens_left"] == 20
    assert len(budgets._of_keys) == 1, "of the last month nothing is kept"


async def test_what_runs_is_reserved_and_what_it_does_not_use_is_free_again(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await started(make_service, worker, budgets={"each_key": {"tokens": 100}})
    plan = worker.does(Plan(tokens=2, stall_at=1))
    first = asyncio.create_task(complete(service, max_tokens=60))
    await service.until_tokens(1)
    assert (await budget(service))["tokens_left"] == 100 - 60 - PROMPT
    await complete(service, 429, max_tokens=60)
    plan.release.set()
    await first
    assert (await budget(service))["tokens_left"] == 100 - 2 - PROMPT


async def test_a_run_has_a_budget_that_its_calls_share(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await started(make_service, worker)
    run = {"session_id": "s-1", "max_run_tokens": 2 * (PROMPT + 5) + 3}
    await complete(service, **run)
    await complete(service, session_id="s-1")  # a later call says nothing
    refused = await complete(service, 429, session_id="s-1")
    assert refused["error"]["tokens_left"] == 3 and "this run" in refused["error"]["message"]
    assert "resets_unix_ms" not in refused["error"], "a run's budget does not come back"
    await complete(service, session_id="s-2")
    told = await complete(service, 400, max_run_tokens=5)
    assert "send the same session_id" in told["error"]["message"]
    await complete(service, 400, session_id="s-1", max_run_cost=-1)
    by_run = (await budget(service, query="?by=run,outcome"))["spent"]
    assert [(one["run"], one["requests"]) for one in by_run] == [("s-1", 2), ("s-2", 1)]


async def test_money_by_the_price_of_a_model(worker: FakeWorker, make_service: MakeService) -> None:
    prices = {"fake": {"prompt": 1000.0, "cached": 0.0, "completion": 2000.0}}
    service = await started(
        make_service, worker, budgets={"each_key": {"cost": 0.025}, "prices": prices}
    )
    await complete(service)
    told = await budget(service)
    assert told["cost_left"] == pytest.approx(0.025 - 0.001 * PROMPT - 5 * 0.002)
    assert told["spent"][0]["cost"] == pytest.approx(0.001 * PROMPT + 5 * 0.002)
    refused = await complete(service, 429, max_tokens=7)
    assert refused["error"]["cost_left"] == pytest.approx(0.01)


async def test_the_books_tell_what_was_spent_in_vain(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """Of whatever outcome; another key sees its own entries, an operator everybody's."""
    service = await started(make_service, worker, keys=KEYS)
    await complete(service, key="alice")
    worker.plan = lambda submit: Plan(stall_at=3)
    async with service.http.post(
        "/v1/completions", json=ASK | {"stream": True, "max_tokens": 10}, headers=bearer("bob")
    ) as response:
        await response.content.readline()
        await service.until_tokens(3)
    await service.until(lambda: len(service.ends) == 2)
    (own,) = (await budget(service, "bob"))["spent"]
    assert (own["outcome"], own["completion_tokens"]) == ("aborted", 3)
    books = room(service.orchestrator, BudgetRoom).budgets.books
    month = month_of(service.clock.unix())
    everybodys, fault = await books.read(month, None, ("key", "outcome"))
    assert not fault
    assert sorted(str(one["outcome"]) for one in everybodys) == ["aborted", "met"]
    for query in ("?month=June", "?by=colour"):
        await service.ask("GET", f"/v2/budget{query}", 400, headers=bearer("bob"))


async def test_the_books_outlive_a_process_and_two_share_a_file(tmp_path: Path) -> None:
    at, path = month_of(NOON), tmp_path / "tasks.books"
    mine, others = Books(path, NOON, Sharing()), Books(path, NOON, Sharing())
    await mine.open()
    await others.open()
    entry = BookEntry(at, "k", "", "m", "met")
    mine.enter(entry, Amount(1, 5, 0, 7, 0.5))
    others.enter(entry, Amount(1, 1, 1, 1, 0.25))
    await mine.flush()
    await others.flush()
    assert others.spent(at, "k") == Amount(2, 6, 1, 8, 0.75)
    others.enter(BookEntry("2026-04", "k", "", "m", "met"), Amount(1, 9, 0, 9, 0.0))
    await mine.close()
    await others.close()
    again = Books(path, NOON, Sharing())
    await again.open()
    assert again.spent(at, "k") == Amount(2, 6, 1, 8, 0.75)
    assert (await asyncio.to_thread(path.stat)).st_mode & 0o77 == 0
    assert again.spent("2026-04", "k") == Amount(), "older than the month before"
    await again.close()


async def test_what_cannot_be_written_still_counts_and_is_written_later(tmp_path: Path) -> None:
    at, path = month_of(NOON), tmp_path / "tasks.books"
    books, entry = Books(path, NOON, Sharing()), BookEntry(month_of(NOON), "k", "", "m", "met")
    await books.open()
    write = books._write

    def full(new: object) -> Any:
        raise sqlite3.OperationalError("disk full")

    books._write = full  # type: ignore[method-assign]
    books.enter(entry, Amount(1, 5, 0, 7, 0.5))
    with pytest.raises(sqlite3.OperationalError, match="disk full"):
        await books.flush()
    books._write = write  # type: ignore[method-assign]
    books.enter(entry, Amount(1, 1, 0, 1, 0.5))
    assert books.spent(at, "k") == Amount(2, 6, 0, 8, 1.0) and books.has_new
    await books.flush()
    assert books.spent(at, "k") == Amount(2, 6, 0, 8, 1.0) and not books.has_new
    await books.close()


async def test_an_entry_counts_once_where_its_reader_leaves() -> None:
    """A client that goes while the books are written cancels its handler, and no write."""
    books, entry, may = Books(None, NOON, Sharing()), BookEntry("m", "k", "", "", ""), Event()
    await books.open()
    books.enter(entry, Amount(1))
    write = books._write
    books._write = lambda new: may.wait() and write(new)  # type: ignore[method-assign, return-value]
    reading = asyncio.create_task(books.read("m", "k", ("key",)))
    while not books._flushing.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait((reading,))
    may.set()
    await books.flush()
    assert books.spent("m", "k") == Amount(1)
    await books.close()


@for_each(
    ("unix", "month", "ends"),
    [(NOON, "2026-06", 1_782_864_000.0), (1_798_761_599.0, "2026-12", 1_798_761_600.0)],
)
def test_months_are_those_of_utc(unix: float, month: str, ends: float) -> None:
    assert (month_of(unix), month_ends(unix)) == (month, ends)


def test_a_budget_of_an_unknown_key_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="names 'carol', which is not among keys"):
        load_settings(keys=KEYS, budgets={"keys": {"carol": {"tokens": 1}}})
