"""OR-5, DL-2: the wall clock is set while tasks and their rows are kept."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from orchestrator.clock import Boot, this_boot
from orchestrator.tasks.journal import file as journal_file
from orchestrator.tasks.journal.file import JournalConfig, connect, open_journal
from orchestrator.tasks.journal.file_store import MAX_OFF_S, AgeClock, remove_old, write
from orchestrator.tasks.journal.records import live_task
from tests.orchestrator.tasks.journal.conftest import Restarts, status_of, task_of
from tests.orchestrator.tasks.journal.test_prefixes import accept, ended
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan

HOUR_S = 3600.0


class Machine:
    """Its clocks, moved by hand."""

    def __init__(self) -> None:
        self.unix_s, self.boot_s = 1_800_000_000.0, 500.0
        self.boot = Boot("first", lambda: self.boot_s)

    def unix(self) -> float:
        return self.unix_s

    def passes(self, seconds: float) -> None:
        self.unix_s += seconds
        self.boot_s += seconds

    def reboots(self, off_s: float) -> None:
        self.unix_s += off_s
        self.boot_s = 20.0
        self.boot = Boot(self.boot.id + " next", lambda: self.boot_s)


def test_processes_of_one_boot_share_its_clock() -> None:
    first, second = this_boot(), this_boot()
    assert first.id and first.id == second.id
    assert second.has(first.id, first.now()) and not second.has("another", first.now())
    assert not second.has(first.id, second.now() + HOUR_S)  # of another time namespace
    assert not Boot("", time.monotonic).has("", 0.0)


@pytest.mark.parametrize("jump_s", [-HOUR_S, 0.0, HOUR_S])
async def test_a_jump_across_a_restart_moves_no_deadline(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    worker.plan = lambda submit: Plan(stall_at=0)
    service = await restarts.start(worker)
    task_id = await task_of(service, deadline_ms=60_000)
    at = service.orchestrator.store.get(task_id).deadline.at
    stated = (await status_of(service, task_id))["deadline_unix_ms"]
    await restarts.die()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    again = await restarts.start(worker)
    # The loop's time stands still while this process has no processor, the boot's does not.
    assert again.orchestrator.store.get(task_id).deadline.at == pytest.approx(at, abs=60)
    assert (await status_of(again, task_id))["deadline_unix_ms"] == stated


@pytest.mark.parametrize(
    "off_s, jump_s, left_s", [(10, 0, 50), (10, -HOUR_S, 60), (10, HOUR_S, 50 - HOUR_S)]
)
def test_across_boots_no_task_gets_more_time_than_it_had(
    off_s: float, jump_s: float, left_s: float
) -> None:
    clock, one = ManualClock(), accept(1)
    assert one.request is not None
    now = clock.now()
    job = replace(one.request.job, arrived=7.0)
    job = replace(job, deadline=replace(job.deadline, at=67.0))
    offset = clock.unix() - off_s - jump_s - job.arrived
    stored = msgspec.structs.replace(one.request, job=job, clock_offset=offset)
    for boot_id, arrived_boot_s in (("earlier", 400.0), (None, None), ("now", 999.0)):
        row = replace(one.row, boot_id=boot_id, arrived_boot_s=arrived_boot_s)
        task = live_task(row, stored, clock, Boot("now", lambda: 500.0))
        assert task.deadline.at - now == pytest.approx(left_s)
        assert task.deadline.at - task.job.arrived == pytest.approx(60)
    row = replace(one.row, boot_id="now", arrived_boot_s=480.0)
    task = live_task(row, stored, clock, Boot("now", lambda: 500.0))
    assert task.deadline.at - now == pytest.approx(40)


@pytest.fixture
def db(tmp_path: Path) -> sqlite3.Connection:
    opened = open_journal(JournalConfig(tmp_path / "journal.db"))
    opened.close()
    return connect(opened.config)


def test_a_jump_removes_nothing_early_and_keeps_nothing_longer(db: sqlite3.Connection) -> None:
    with closing(db):
        machine = Machine()
        ages = AgeClock(machine.unix, machine.boot)
        ages.load(db)

        def end(n: int) -> None:
            write(db, [accept(n)], ages.now())
            write(db, [ended(n, [1])], ages.now())

        def left() -> list[int]:
            remove_old(db, ages.now() - 100, ages.now() - 100)
            return [n for (n,) in db.execute("SELECT n FROM results ORDER BY n")]

        end(1)
        machine.unix_s += 10 * 365 * 86_400  # somebody sets the clock
        machine.passes(60)
        end(2)  # while it is wrong
        assert left() == [1, 2]
        machine.unix_s -= 20 * 365 * 86_400
        machine.passes(60)
        assert left() == [2]
        machine.passes(60)
        assert left() == []
        assert db.execute("SELECT count(*) FROM tasks").fetchone() == (0,)


@pytest.mark.parametrize(
    "off_s, believed_s", [(50.0, 50.0), (-HOUR_S, 0.0), (400 * 86_400.0, MAX_OFF_S)]
)
def test_time_off_is_believed_up_to_a_day(
    db: sqlite3.Connection, off_s: float, believed_s: float
) -> None:
    with closing(db):
        machine = Machine()
        first = AgeClock(machine.unix, machine.boot)
        first.load(db)
        first.save(db)
        before = first.now()
        machine.passes(30)
        machine.unix_s += HOUR_S
        same_boot = AgeClock(machine.unix, machine.boot)
        same_boot.load(db)
        assert same_boot.now() == pytest.approx(before + 30)
        same_boot.save(db)
        machine.reboots(off_s)
        other_boot = AgeClock(machine.unix, machine.boot)
        other_boot.load(db)
        assert other_boot.now() == pytest.approx(before + 30 + believed_s)
        machine.passes(7)
        assert other_boot.now() == pytest.approx(before + 37 + believed_s)


def test_the_boot_is_read_when_the_journal_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "this_boot", lambda: Boot("mine", lambda: 1.0))
    opened = open_journal(JournalConfig(tmp_path / "journal.db"))
    assert opened.boot.id == "mine"
    opened.close()
