"""OR-5: what becomes of tasks that had not ended; each gets one terminal record, and runs once."""

import asyncio
import time
from dataclasses import replace

import aiohttp
import msgspec
import pytest

from orchestrator.clock import Boot
from orchestrator.dispatch.retry import BACKOFF_S, FATE_S
from orchestrator.tasks.journal.records import live_task
from tests.orchestrator.conftest import Service, bearer
from tests.orchestrator.tasks.journal.conftest import (
    Disk,
    Restarts,
    events_of,
    hold_writes,
    recovered,
    running,
    speaking,
    status_of,
    submit,
    task_of,
    until_tidied,
)
from tests.orchestrator.tasks.journal.test_prefixes import accept
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.steady_loop import hurry

SECRET = "the password is swordfish"


async def test_dl18_what_was_decoding_before_a_restart_is_no_wait_after_it(
    restarts: Restarts, worker: FakeWorker
) -> None:
    service = await restarts.start(worker)
    task_id = await running(service, worker)
    [task] = service.orchestrator._live
    *_, decode_s = task.time_spent.seconds(service.clock.now())
    assert decode_s > 0
    await restarts.die()
    worker.plan = lambda job: Plan(stall_at=0)
    again = await restarts.start(worker)
    [task] = again.orchestrator._live
    assert task.id == task_id
    now = again.clock.now()
    *_, decode_again_s = task.time_spent.seconds(now)
    # What it had decoded when its tokens were written, and not the time when nobody served it.
    assert 0 < decode_again_s < decode_s
    assert sum(task.time_spent.seconds(now)) == pytest.approx(now - task.marks.received)


async def test_one_whose_deadline_has_passed_is_closed_as_such(
    restarts: Restarts, worker: FakeWorker
) -> None:
    service = await restarts.start(worker)
    hurry(1)  # the next process goes by the machine's own clock
    task_id = await running(service, worker, deadline_ms=1000)
    await restarts.die()
    await service.until(lambda: service.orchestrator.live_tasks == 0)  # here it ends of itself
    again = await restarts.start(worker)
    status = await status_of(again, task_id)
    assert (status["outcome"], status["error"]["code"]) == ("missed", "deadline_exceeded")
    assert status["usage"]["completion_tokens"] == 4 and status["text"]
    assert recovered(again) == {"expired": 1} and len(worker.submits) == 1


async def test_a_cancelled_one_stays_cancelled(restarts: Restarts, worker: FakeWorker) -> None:
    service = await restarts.start(worker)
    task_id = await running(service, worker)
    await service.ask("POST", f"/v2/tasks/{task_id}/cancel", 202)
    await restarts.die()
    again = await restarts.start(worker)
    assert (await status_of(again, task_id))["outcome"] == "aborted"
    assert recovered(again) == {}


async def test_no_limit_refuses_what_was_promised(restarts: Restarts, worker: FakeWorker) -> None:
    """They go before what comes now."""
    worker.plan = lambda job: Plan(stall_at=0)
    service = await restarts.start(worker)
    ids = [await task_of(service) for _ in range(4)]
    await restarts.die()
    again = await restarts.start(
        worker,
        wait=False,
        queue__max_waiting=0,
        limits__each_key__requests_per_min=1,
        limits__each_key__concurrent=1,
    )
    assert again.orchestrator.live_tasks == 4  # before any instance is there
    worker.plan = lambda job: Plan()
    for task_id in ids:
        assert (await events_of(again, task_id))[-1].event == "end"
    assert again.outcomes() == ["met"] * 4


async def test_a_client_sees_an_end_only_once_it_is_on_the_disk(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await restarts.start(worker)
    held = worker.does(Plan(stall_at=1))
    task_id = await task_of(service)
    go_on = hold_writes(monkeypatch)
    held.release.set()
    following = asyncio.create_task(events_of(service, task_id))
    await service.until(lambda: service.outcomes() == ["met"])
    await asyncio.sleep(0.05)
    assert not following.done()
    asking = asyncio.create_task(status_of(service, task_id))
    await asyncio.sleep(0.05)
    assert not asking.done()
    go_on.set()
    assert (await following)[-1].event == "end"
    assert (await asking)["status"] == "ended"


async def test_a_planned_end_leaves_durable_tasks_to_the_next_process(
    restarts: Restarts, worker: FakeWorker
) -> None:
    """OR-14: what does not finish in time is persisted. DL-10: it is one request still, and comes
    to its one outcome there, however often the drain was taken back before."""
    service = await restarts.start(worker)
    task_id = await running(service, worker)
    following = asyncio.create_task(events_of(service, task_id))
    await service.until(lambda: len(service.orchestrator.store.get(task_id).listeners) > 1)
    lifecycle = service.parts.lifecycle
    for _ in range(2):
        await lifecycle.drain(0.0)
        assert service.metric("tidegate_journal_left") == 1
        lifecycle.undrain()
        await service.until(lambda: service.orchestrator.live_tasks == 1)
        assert service.metric("tidegate_journal_left") == 0
    await lifecycle.drain(0.0)
    with pytest.raises(aiohttp.ClientPayloadError):  # no end: its client asks again
        await following
    told = await service.ask("GET", f"/v2/tasks/{task_id}", 503)
    assert told["error"]["code"] == "draining"
    await lifecycle.close()
    assert service.outcomes() == []
    assert service.metric("tidegate_offered_total", api="tasks") == 1
    plan = speaking(service)
    worker.plan = lambda job: plan
    again = await restarts.start(worker)
    events = await events_of(again, task_id, after="5")
    assert [int(event.id) for event in events] == list(range(6, 13)) and events[-1].event == "end"
    assert again.outcomes() == ["met"]
    assert again.metric("tidegate_recovered_total", api="tasks") == 1
    assert again.metric("tidegate_offered_total", api="tasks") == 0


async def test_a_drain_that_is_taken_back_takes_its_tasks_back(
    restarts: Restarts, worker: FakeWorker
) -> None:
    """OR-14: there is no next process then, and nobody else would ever end them."""
    service = await restarts.start(worker)
    task_id = await running(service, worker, on_deadline="partial")
    lifecycle = service.parts.lifecycle
    await lifecycle.drain(0.0)
    plan = speaking(service)
    worker.plan = lambda job: plan
    lifecycle.undrain()
    events = await events_of(service, task_id, after="5")
    assert [int(event.id) for event in events] == list(range(6, 13)) and events[-1].event == "end"
    assert service.orchestrator.live_tasks == 0 and len(service.orchestrator.store) == 1
    # It was offered once, and met: the drain is in no book.
    assert [record.task_id for record in service.ends] == [task_id]
    assert service.outcomes() == ["met"]
    assert service.metric("tidegate_offered_total", api="tasks") == 1
    assert sum(service.orchestrator.stages.settler.metrics.settled.values()) == 1


@pytest.mark.parametrize("dies", [False, True])
async def test_a_lane_that_flaps_costs_no_try_and_a_worker_that_dies_does(
    restarts: Restarts, worker: FakeWorker, dies: bool
) -> None:
    service = await restarts.start(worker, ATTEMPTS=2)
    worker.plan = lambda job: speaking(service, stall_at=2)
    terms = {"prompt": None, "prompt_token_ids": [70, 71, 72], "max_tokens": 10}
    task_id = await task_of(service, deadline_ms=60_000, **terms)
    for attempt in range(1, 4):
        await service.until_tokens(2 * attempt)
        await worker.stop()
        await service.until(lambda: not any(i.ready for i in service.orchestrator.registry))
        if service.outcomes():
            break
        assert service.orchestrator.store.get(task_id).attempts == attempt
        if dies:
            worker.process_id = f"another {attempt}"
        if attempt == 3:
            worker.plan = lambda job: speaking(service)
        await worker.start()
    events = await events_of(service, task_id)
    if dies:
        assert attempt == 2 and events[-1].json()["code"] == "instance_lost"
    else:
        assert [int(event.id) for event in events] == list(range(13)) and events[-1].event == "end"


async def test_a_durable_task_that_two_workers_died_with_is_given_to_no_third(
    restarts: Restarts, worker: FakeWorker
) -> None:
    """It waits until it is known that they died: with none there, there is nothing to lose."""
    service = await restarts.start(worker, ATTEMPTS=9)
    worker.plan = lambda job: speaking(service, stall_at=2)
    task_id = await task_of(service, deadline_ms=600_000)
    for death in range(2):
        await service.until(lambda death=death: len(worker.submits) == death + 1)  # type: ignore[misc]
        await worker.stop()
        await service.until(lambda: not any(i.ready for i in service.orchestrator.registry))
        service.leap(2 * FATE_S)
        await asyncio.sleep(2 * BACKOFF_S)
        assert service.outcomes() == []
        worker.process_id += " and another"
        await worker.start()
    events = await events_of(service, task_id)
    assert events[-1].json()["code"] == "poison_request"
    assert len(worker.submits) == 2 and service.outcomes() == ["failed"]


async def test_a_drain_promises_nothing_that_is_not_on_the_disk(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is told at once, and may go elsewhere: the next process must not run it too."""
    service = await restarts.start(worker)
    worker.plan = lambda job: Plan(stall_at=1)
    with monkeypatch.context() as slow:
        go_on = hold_writes(slow)
        submitting = asyncio.create_task(submit(service, key="mine"))
        await service.until(lambda: service.orchestrator.live_tasks == 1)
        await worker.until(lambda: worker.running == 1)
        await service.parts.lifecycle.drain(0.0)
        status, answer = await submitting
        assert (status, answer["error"]["code"]) == (503, "draining")
        go_on.set()
        await service.parts.lifecycle.close()
    await restarts.die()
    again = await restarts.start(worker)
    assert recovered(again) == {} and len(worker.submits) == 1
    await task_of(again, key="mine")  # a new one
    await worker.until(lambda: len(worker.submits) == 2)


@pytest.mark.parametrize("on_disconnect", ["continue", "cancel"])
async def test_a_submission_is_repeated_while_the_first_is_written(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, on_disconnect: str
) -> None:
    """Its client has gone in the midst of it. One task by that name; one that went with its
    client keeps no name."""
    service = await restarts.start(worker)
    go_on = hold_writes(monkeypatch)
    worker.plan = lambda job: Plan(stall_at=1)
    first = asyncio.create_task(submit(service, key="mine", on_disconnect=on_disconnect))
    await worker.until(lambda: worker.running == 1)
    (live,) = service.orchestrator._live
    first.cancel()
    if on_disconnect == "cancel":
        await service.until(lambda: live.ending is not None)
    else:  # until the service has seen it go; else the second waits for the first, as well
        await asyncio.sleep(0.05)
    worker.plan = lambda job: Plan()
    second = asyncio.create_task(submit(service, key="mine", on_disconnect=on_disconnect))
    other = asyncio.create_task(submit(service))
    await asyncio.sleep(0.1)
    go_on.set()
    status, answer = await second
    assert status == 202 and (await other)[0] == 202
    assert (answer["task_id"] == live.id) is (on_disconnect == "continue")
    assert (await task_of(service, key="mine", on_disconnect=on_disconnect)) == answer["task_id"]


async def test_without_a_journal_durable_is_an_error(service: Service) -> None:
    status, answer = await submit(service)
    assert (status, answer["error"]["field"]) == (400, "durable")
    assert "TIDEGATE_JOURNAL__PATH" in answer["error"]["message"]


async def test_an_asynchronous_journal_says_what_may_be_lost_and_keeps_the_rest(
    restarts: Restarts, worker: FakeWorker, disk: Disk
) -> None:
    service = await restarts.start(worker, journal__loss_window_ms=1)
    await until_tidied(service)  # else that may find the fault first, and the task is refused
    disk.fail("SQLITE_FULL", "database or disk is full")
    status, answer = await submit(service)
    assert (status, answer["durable"], answer["loss_window_ms"]) == (202, True, 1)
    assert (await events_of(service, answer["task_id"]))[-1].event == "end"
    await service.until(lambda: service.metric("tidegate_journal_unwritten") == 2)
    disk.error = None
    await service.until(lambda: service.metric("tidegate_journal_unwritten") == 0)
    await restarts.die()
    again = await restarts.start(worker)
    assert (await status_of(again, answer["task_id"]))["outcome"] == "met"


async def test_prompts_are_gone_with_their_task(restarts: Restarts, worker: FakeWorker) -> None:
    service = await restarts.start(worker)
    held = worker.does(Plan(stall_at=1))
    letters = service.orchestrator.models.resolve("")
    ids = list(letters.encode(SECRET))
    needle = b"".join(one.to_bytes(4, "little") for one in ids)
    task_id = await task_of(service, prompt=SECRET, stop=[SECRET[::-1]])

    def is_there(what: bytes) -> bool:
        return any(what in p.read_bytes() for p in restarts.path.parent.glob("journal.db*"))

    for what in (needle, SECRET[::-1].encode()):
        assert await asyncio.to_thread(is_there, what)
    held.release.set()
    await events_of(service, task_id)
    await service.parts.lifecycle.drain(0.0)
    await service.parts.lifecycle.close()
    for what in (needle, SECRET[::-1].encode()):
        assert not await asyncio.to_thread(is_there, what)
    again = await restarts.start(worker)
    assert (await status_of(again, task_id))["text"].startswith("w0 ")


async def test_others_cannot_read_a_recovered_task(restarts: Restarts, worker: FakeWorker) -> None:
    keys = {"alice": {"token": "alice-token"}, "bob": {"token": "bob-token"}}
    service = await restarts.start(worker, keys=keys)
    headers = {"Authorization": "Bearer alice-token"}
    body = {"prompt": "hi", "max_tokens": 2, "durable": True}
    task_id = (await service.ask("POST", "/v2/tasks", 202, json=body, headers=headers))["task_id"]
    await service.ask("GET", f"/v2/tasks/{task_id}/events", headers=headers)
    await restarts.die()
    again = await restarts.start(worker, keys=keys)
    for token, expected in (("alice-token", 200), ("bob-token", 404)):
        await again.ask("GET", f"/v2/tasks/{task_id}", expected, headers=bearer(token))


HOUR_S = 3600.0


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
async def test_a_jump_across_a_restart_moves_no_deadline(
    restarts: Restarts, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """DL-2: the wall clock is set while tasks are kept."""
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
