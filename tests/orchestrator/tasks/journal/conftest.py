"""A journal whose disk fails on demand, and orchestrators that die."""

import asyncio
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tasks.journal import file_store, store
from orchestrator.tasks.journal.records import Operation, StoredTokens, Tokens
from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sse import Event

TASK: dict[str, Any] = {"prompt": "hi", "max_tokens": 6, "durable": True}


async def submit(service: Service, key: str | None = None, **changes: object) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await service.answer("POST", "/v2/tasks", json=TASK | changes, headers=headers)


async def task_of(service: Service, key: str | None = None, **changes: object) -> str:
    status, answer = await submit(service, key, **changes)
    assert status == 202, answer
    task_id: str = answer["task_id"]
    return task_id


async def status_of(service: Service, task_id: str) -> Any:
    _, told = await service.answer("GET", f"/v2/tasks/{task_id}")
    return told


async def events_of(service: Service, task_id: str, after: str = "") -> list[Event]:
    events = await service.follow(f"/v2/tasks/{task_id}/events", after)
    return [event for event in events if event.event != "metrics"]


async def ready_of(service: Service) -> tuple[int, Any]:
    return await service.answer("GET", "/health/ready")


async def until_journalled(service: Service, tokens: int) -> None:
    """So many tokens of the one task that lives are on the disk."""
    durable = service.journal
    await service.until(lambda: [entry.tokens for entry in durable._live.values()] == [tokens])
    commits = durable.commits
    durable.writer.put(Tokens(0, 0, StoredTokens(b"", [])))
    await service.until(lambda: durable.commits > commits)


async def until_tidied(service: Service) -> None:
    """The journal's thread has made its file and looked for what is too old, as it does first."""
    await service.until(lambda: service.journal.writer._tidied > 0)


async def running(service: Service, worker: FakeWorker, **changes: object) -> str:
    """A task, of ten tokens as a rule, four of which are in the journal; it stands still there."""
    letters = service.orchestrator.models.resolve("").tokens
    plan = Plan(stall_at=4, speak=lambda at: (70 + at, letters.text_of([70 + at])))
    worker.plan = lambda job: plan
    terms = {"prompt": None, "prompt_token_ids": [70, 71, 72], "max_tokens": 10}
    task_id = await task_of(service, **(terms | changes))
    await until_journalled(service, 4)
    return task_id


def speaking(service: Service, shift: int = 0, **changes: object) -> Plan:
    letters = service.orchestrator.models.resolve("").tokens
    return Plan(
        speak=lambda at: (70 + at + shift, letters.text_of([70 + at + shift])),
        **changes,  # type: ignore[arg-type]
    )


def recovered(service: Service) -> dict[str, int]:
    return dict(service.journal.recovered)


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No transaction is begun until the event is set."""
    go_on, loop = asyncio.Event(), asyncio.get_running_loop()
    write = file_store.JournalWriter._write

    def held(self: file_store.JournalWriter, operations: Sequence[Operation]) -> None:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        write(self, operations)

    monkeypatch.setattr(file_store.JournalWriter, "_write", held)
    return go_on


def dead_copy(path: Path, to: Path) -> Path:
    """The files of a journal as a process leaves them that is killed now."""
    to.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        if file.is_dir():
            shutil.copytree(file, to / file.name)
        elif not file.name.endswith((".lock", "-shm")):
            shutil.copy(file, to / file.name)
    return to / path.name


class Restarts:
    """Orchestrators one after the other on one journal, in front of the same workers."""

    def __init__(self, make_service: MakeService, folder: Path) -> None:
        self._make = make_service
        self._folder = folder
        self.count = 0
        self.path = folder / "0" / "journal.db"

    async def start(self, *workers: FakeWorker, wait: bool = True, **settings: object) -> Service:
        return await self._make(*workers, wait=wait, journal__path=self.path, **settings)

    async def die(self) -> None:
        """What was written until now is all that the next one gets."""
        self.count += 1
        self.path = await asyncio.to_thread(dead_copy, self.path, self._folder / str(self.count))


@pytest.fixture
def restarts(make_service: MakeService, tmp_path: Path) -> Restarts:
    return Restarts(make_service, tmp_path)


class Disk:
    """What the disk does to a writer."""

    def __init__(self) -> None:
        self.error: sqlite3.Error | None = None
        """Raised by every transaction."""

    def fail(self, name: str, message: str) -> None:
        """Every transaction fails with SQLite's error of that name."""
        kind = sqlite3.OperationalError
        if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
            kind = sqlite3.DatabaseError  # type: ignore[assignment]
        self.error = kind(message)
        self.error.sqlite_errorname = name


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk under every journal of the test, which is looked at often."""
    disk = Disk()

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, values: Iterable[object] = ()) -> sqlite3.Cursor:  # type: ignore[override]
            if disk.error is not None and sql == "COMMIT":
                raise disk.error
            return super().execute(sql, values)  # type: ignore[arg-type]

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **more: connect(path, factory=Connection, **more)
    )
    monkeypatch.setattr(store, "RETRY_S", 0.01)
    return disk
