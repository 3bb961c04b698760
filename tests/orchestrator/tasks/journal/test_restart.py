"""OR-5, OR-2: what is in the journal when the process dies is what the next one goes on with.

A death is a copy of the journal's files as they are at that moment: what a process has not written
by then, nobody ever sees.
"""

from typing import Any

from tests.orchestrator.conftest import Service
from tests.orchestrator.tasks.journal.conftest import (
    Restarts,
    events_of,
    status_of,
    submit,
    task_of,
)
from tests.support.fake_worker import FakeWorker, Plan


async def test_a_queued_task_runs_after_a_restart_with_its_own_deadline(
    restarts: Restarts, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=0)
    service = await restarts.start(worker)
    task_id = await task_of(service, deadline_ms=60_000)
    before = await status_of(service, task_id)
    await restarts.die()
    worker.plan = lambda submit: Plan()
    again = await restarts.start(worker)
    events = await events_of(again, task_id)
    assert [event.event for event in events] == ["queued", "started", *["token"] * 6, "end"]
    assert [int(event.id) for event in events] == list(range(9))
    after = await status_of(again, task_id)
    assert after["outcome"] == "met" and after["text"] == "w0 w1 w2 w3 w4 w5 "
    assert after["deadline_unix_ms"] == before["deadline_unix_ms"]
    budgets = [job.deadline_unix_ms for job in worker.submits]
    assert budgets[0] == budgets[-1]


async def test_an_ended_task_replays_after_a_restart(
    restarts: Restarts, worker: FakeWorker
) -> None:
    service = await restarts.start(worker)
    task_id = await task_of(service, key="mine")
    told = await events_of(service, task_id)
    status = await status_of(service, task_id)
    await restarts.die()
    again = await restarts.start(worker)
    assert await status_of(again, task_id) == status
    replayed = await events_of(again, task_id, after="1")
    assert [(e.id, e.event, e.data) for e in replayed] == [
        (e.id, e.event, e.data) for e in told if int(e.id) > 1
    ]
    assert await task_of(again, key="mine") == task_id
    status_code, answer = await submit(again, "mine", max_tokens=3)
    assert status_code == 422 and answer["error"]["field"] == "Idempotency-Key"
    assert len(worker.submits) == 1
    async with again.http.get(
        f"/v2/tasks/{task_id}/events", headers={"Last-Event-ID": told[-1].id}
    ) as response:
        assert response.status == 204


def _live(service: Service) -> Any:
    durable = service.orchestrator.stages.durable
    assert durable is not None
    return durable._live.values()
