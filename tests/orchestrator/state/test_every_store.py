"""OR-5, OR-18: what holds for durable tasks in every store: one suite over a file and a store that
orchestrators share.

A death leaves what was written by then: of a file the next process gets a copy, in a shared store
another member finds one that renews its lease no more.
"""

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tasks.journal import store
from protocol import Submit
from tests.orchestrator.conftest import Service
from tests.orchestrator.state.conftest import Sharing, freeze, state_of, until_in_store
from tests.orchestrator.tasks.journal.conftest import (
    Disk,
    Restarts,
    events_of,
    ready_of,
    recovered,
    running,
    speaking,
    status_of,
    submit,
    task_of,
    until_journalled,
)
from tests.support.fake_worker import FakeWorker, Plan

NONE_KEPT = {"keep_count": 0}


class Stored(ABC):
    """A store, and orchestrators one after the other that use it."""

    fault: str
    """What clients are told of a store that takes nothing."""

    @abstractmethod
    async def start(self, worker: FakeWorker, **settings: object) -> Service:
        """An orchestrator that uses the store."""

    @abstractmethod
    async def next(
        self, dead: Service, worker: FakeWorker, tasks: int = 0, **settings: object
    ) -> Service:
        """The orchestrator after one that has just died, once it has that one's live ``tasks``."""

    @abstractmethod
    async def fail(self) -> None:
        """Make the store take nothing, until ``mend``."""

    @abstractmethod
    async def mend(self) -> None: ...

    @abstractmethod
    async def empty(self, service: Service, task_id: str) -> None:
        """Lose all that the store has; returns when the live task ``task_id`` is in it again."""


class InFile(Stored):
    fault = "database or disk is full"

    def __init__(self, restarts: Restarts, disk: Disk) -> None:
        self._restarts, self._disk = restarts, disk

    async def start(self, worker: FakeWorker, **settings: object) -> Service:
        return await self._restarts.start(worker, **settings)

    async def next(
        self, dead: Service, worker: FakeWorker, tasks: int = 0, **settings: object
    ) -> Service:
        await self._restarts.die()
        return await self.start(worker, **settings)

    async def fail(self) -> None:
        self._disk.fail("SQLITE_FULL", self.fault)

    async def mend(self) -> None:
        self._disk.error = None

    async def empty(self, service: Service, task_id: str) -> None:
        for suffix in ("-wal", "-shm", ""):  # once the last is gone, there may be new ones
            await asyncio.to_thread(Path(f"{self._restarts.path}{suffix}").unlink)
        await task_of(service)  # the next write finds it out
        service.journal.flush()
        await task_of(service)


class InSharedStore(Stored):
    fault = "the store cannot be reached"

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    async def start(self, worker: FakeWorker, **settings: object) -> Service:
        return await self._sharing.member(worker, **settings)

    async def next(
        self, dead: Service, worker: FakeWorker, tasks: int = 0, **settings: object
    ) -> Service:
        freeze(dead)
        service = await self.start(worker, **settings)
        await service.until(lambda: state_of(service).taken == tasks)
        return service

    async def fail(self) -> None:
        await self._sharing.store.kill()

    async def mend(self) -> None:
        await self._sharing.store.start()

    async def empty(self, service: Service, task_id: str) -> None:
        async with self._sharing.store.client() as client:
            await client.flushall()
        members = state_of(service).members
        renewals = members.renewals
        await service.until(lambda: members.renewals > renewals + 1)
        await until_in_store(self._sharing.store, task_id, "request")


class EveryStore:
    """The suite; a subclass has the fixture ``stored``."""

    @pytest.mark.parametrize("cut", [0, 2, 3])
    async def test_every_prefix_of_a_life_has_one_end(
        self, stored: Stored, worker: FakeWorker, cut: int
    ) -> None:
        """Accepted, some tokens, the end: whichever was last, the text is the same, and
        so are its events and its deadline."""
        service = await stored.start(worker)
        stops = {0: Plan(stall_at=0), 2: Plan(stall_at=5), 3: Plan()}
        letters = service.orchestrator.models.resolve("").tokens
        submits = 1 if cut == 3 else 2

        def plan(job: Submit) -> Plan:
            chosen = stops[cut] if len(worker.submits) == 1 else Plan()
            chosen.speak = lambda at: (70 + at, letters.text_of([70 + at]))
            return chosen

        worker.plan = plan
        terms: dict[str, Any] = {"prompt": None, "prompt_token_ids": [70, 71, 72], "max_tokens": 8}
        task_id = await task_of(service, deadline_ms=60_000, **terms)
        before = await status_of(service, task_id)
        if cut == 3:
            await events_of(service, task_id)
        elif cut:
            await until_journalled(service, 5)
        again = await stored.next(service, worker, submits - 1)
        events = await events_of(again, task_id)
        assert [int(event.id) for event in events] == list(range(11))
        text = "".join(e.json()["text"] for e in events if e.event == "token")
        assert text == letters.text_of(range(73, 81))
        after = await status_of(again, task_id)
        assert after["outcome"] == "met"
        assert after["deadline_unix_ms"] == before["deadline_unix_ms"]
        third = await stored.next(again, worker)
        last = (await events_of(third, task_id))[-1]
        assert (last.event, last.data) == (events[-1].event, events[-1].data)
        assert recovered(third) == {} and len(worker.submits) == submits

    async def test_an_ended_task_is_replayed(self, stored: Stored, worker: FakeWorker) -> None:
        service = await stored.start(worker)
        task_id = await task_of(service, key="mine")
        told = await events_of(service, task_id)
        status = await status_of(service, task_id)
        again = await stored.next(service, worker)
        assert await status_of(again, task_id) == status
        replayed = await events_of(again, task_id, after="1")
        assert [(e.id, e.event, e.data) for e in replayed] == [
            (e.id, e.event, e.data) for e in told if int(e.id) > 1
        ]
        assert await task_of(again, key="mine") == task_id
        code, answer = await submit(again, "mine", max_tokens=3)
        assert code == 422 and answer["error"]["field"] == "Idempotency-Key"
        assert len(worker.submits) == 1
        headers = {"Last-Event-ID": told[-1].id}
        await again.ask("GET", f"/v2/tasks/{task_id}/events", 204, headers=headers)

    async def test_while_it_fails_durable_work_is_refused_and_ends_are_told(
        self, stored: Stored, worker: FakeWorker
    ) -> None:
        held = Plan(stall_at=2)
        worker.plan = lambda job: held if len(worker.submits) == 1 else Plan()
        service = await stored.start(worker)
        task_id = await task_of(service)
        await service.until_tokens(2)
        await stored.fail()
        for _ in range(2):  # the first finds it out
            status, answer = await submit(service, "mine")
            error = answer["error"]
            assert (status, error["code"], error["retryable"]) == (503, "journal_unavailable", True)
            assert stored.fault in error["message"]
        assert (await submit(service, durable=False))[0] == 202
        held.release.set()
        assert (await events_of(service, task_id))[-1].event == "end"
        await service.until(lambda: service.journal.writer.unwritten > 0)
        service.parts.health.refresh()  # as upkeep does
        status, health = await ready_of(service)
        assert (status, health["status"]) == (200, "degraded")
        assert health["journal"]["unwritten"] > 0 and stored.fault in health["journal"]["fault"]
        assert service.metric("tidegate_journal_failing") == 1
        await stored.mend()
        await service.until(
            lambda: not service.journal.fault and not service.journal.writer.unwritten
        )
        other = await task_of(service, "mine")  # what was refused keeps no key
        assert (await events_of(service, other))[-1].event == "end"
        submitted = len(worker.submits)
        again = await stored.next(service, worker)
        found = await status_of(again, task_id)
        assert (found["outcome"], found["text"]) == ("met", "w0 w1 w2 w3 w4 w5 ")
        assert len(worker.submits) == submitted

    async def test_one_that_lost_everything_gets_what_lives(
        self, stored: Stored, worker: FakeWorker
    ) -> None:
        service = await stored.start(worker)
        task_id = await running(service, worker)
        worker.plan = lambda job: speaking(service)
        await stored.empty(service, task_id)
        await service.until(lambda: service.orchestrator.live_tasks == 1)
        again = await stored.next(service, worker, 1)
        assert (await events_of(again, task_id))[-1].event == "end"

    async def test_results_and_rows_go_when_their_time_has_come(
        self, stored: Stored, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store, "TIDY_EVERY_S", 0.02)
        terms = {"journal__keep_results_s": 0, "KEPT_TASKS": NONE_KEPT}
        service = await stored.start(worker, KEEP_OUTCOMES_S=1000.0, **terms)
        task_id = await task_of(service, key="mine")
        await events_of(service, task_id)
        while not (status := await status_of(service, task_id)).get("text_removed"):
            pass
        assert (status["outcome"], status["text"]) == ("met", "")
        assert status["usage"]["completion_tokens"] == 6
        assert await task_of(service, key="mine") == task_id
        again = await stored.next(service, worker, KEEP_OUTCOMES_S=0.0, **terms)
        short = await task_of(again)
        while (await status_of(again, short)).get("error", {}).get("code") != "not_found":
            pass


class TestFile(EveryStore):
    @pytest.fixture
    def stored(self, restarts: Restarts, disk: Disk) -> Stored:
        return InFile(restarts, disk)


class TestSharedStore(EveryStore):
    @pytest.fixture
    def stored(self, sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> Stored:
        monkeypatch.setattr(store, "RETRY_S", 0.01)
        return InSharedStore(sharing)
