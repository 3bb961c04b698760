"""OR-5, DL-2: the wall clock is set while tasks are kept."""

import time
from dataclasses import replace

import msgspec
import pytest

from orchestrator.clock import Boot
from orchestrator.tasks.journal.records import live_task
from tests.orchestrator.tasks.journal.conftest import Restarts, status_of, task_of
from tests.orchestrator.tasks.journal.test_prefixes import accept
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan

HOUR_S = 3600.0


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
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
