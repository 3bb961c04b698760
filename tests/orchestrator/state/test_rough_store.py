"""OR-18: a store that is slow, full, cut off, old, or another's: what is said, and what continues.

How each request ended is counted by every service when it is closed (DL-10): nothing is lost.
"""

import asyncio
import logging
from typing import Any

import pytest

from orchestrator.clock import Boot
from orchestrator.state import connection
from tests.orchestrator.conftest import MakeWorker, Service
from tests.orchestrator.state.conftest import (
    Sharing,
    freeze,
    is_dead,
    see_each_other,
    state_of,
    until_in_store,
)
from tests.orchestrator.tasks.journal.conftest import events_of, ready_of, running, speaking, submit
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.rough_network import RoughNetwork

pytestmark = pytest.mark.slow


async def fault_of(service: Service) -> Any:
    """What the service says of its store, once it says anything."""
    await service.until(lambda: bool(state_of(service).members.fault))
    service.parts.health.refresh()
    status, body = await ready_of(service)
    assert (status, body["status"]) == (200, "degraded"), "all but durable tasks are served"
    return body["state"]["fault"]


async def test_a_slow_store_costs_time_and_nothing_else(
    sharing: Sharing, worker: FakeWorker, network: RoughNetwork
) -> None:
    network.delay_s = 0.3
    slow = {"state__url": sharing.far_url, "LEASE_S": 5.0}
    one = await sharing.member(worker, **slow, limits__each_key__requests_per_min=3)
    statuses = [(await submit(one, durable=durable))[0] for durable in (True, False) * 2]
    assert statuses == [202, 202, 202, 429]
    counting = state_of(one).limits
    assert counting is not None
    assert counting.alone <= 1, "the first has to connect, which takes several answers"
    await one.until(lambda: not one.orchestrator.live_tasks)
    assert not state_of(one).members.fault
    service_state = (await ready_of(one))[1]["state"]
    assert service_state == {"members": 1, "fault": None, "strangers": []}


async def test_a_full_store_takes_no_more_tasks_and_all_else_goes_on(
    sharing: Sharing, worker: FakeWorker
) -> None:
    """Ends are written, for they make room; leases, limits and takeovers go on."""
    one, two = await sharing.members(worker, limits__each_key__requests_per_min=5)
    task_id = await running(one, worker)
    worker.plan = lambda job: speaking(two)
    async with sharing.store.client() as client:
        await client.config_set("maxmemory", 1)
        await two.until(lambda: bool(two.journal.fault))
        status, answer = await submit(two)
        assert status == 503 and "the store's memory is full" in answer["error"]["message"]
        assert (await submit(two, durable=False))[0] == 202
        assert not state_of(two).members.fault and not state_of(one).members.fault
        freeze(one)
        await two.until(lambda: state_of(two).taken == 1)
        assert (await events_of(two, task_id))[-1].event == "end"
        await until_in_store(sharing.store, task_id, "end")
        statuses = [(await submit(two, durable=False))[0] for _ in range(4)]
        assert statuses == [202, 202, 202, 429], "of five, one came to each before"
        await client.config_set("maxmemory", 0)
    await two.until(lambda: not two.journal.fault)


async def test_who_is_cut_off_goes_on_alone_and_comes_back(
    sharing: Sharing, worker: FakeWorker, network: RoughNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its durable task is taken on by another, and has one end; it refuses new ones only."""
    monkeypatch.setattr(connection, "TIMEOUT_S", 1.0)
    one = await sharing.member(worker, state__url=sharing.far_url)
    two = await sharing.member(worker)
    await see_each_other(one, two)
    task_id = await running(one, worker)
    held = speaking(two, stall_at=2)
    worker.plan = lambda job: held
    network.partition()
    await two.until(lambda: state_of(two).taken == 1)
    assert await fault_of(one) == "the store did not answer within 1 s"
    await one.until(lambda: bool(one.journal.fault))
    assert (await submit(one))[0] == 503 and (await submit(one, durable=False))[0] == 202
    network.heal()
    await one.until(lambda: not state_of(one).members.fault and not one.journal.fault)
    await see_each_other(one, two)
    await one.until(lambda: one.journal.lost == 1)
    held.release.set()
    assert (await events_of(one, task_id))[-1].event == "end"
    assert (await submit(one))[0] == 202


async def test_what_another_version_has_is_not_touched(
    sharing: Sharing, worker: FakeWorker
) -> None:
    async with sharing.store.client() as client:
        await client.set("{tidegate}:layout", "99")
        one = await sharing.loner(worker)
        assert "run orchestrators of one version, or set another" in await fault_of(one)
        assert (await submit(one))[0] == 503
        assert await client.keys("*") == [b"{tidegate}:layout"]
        await client.delete("{tidegate}:layout")
    await one.until(lambda: not state_of(one).members.fault)


async def test_two_services_under_one_prefix_are_told_apart(
    sharing: Sharing, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """By their keys; each takes on the tasks of its own dead only, as long as there are others."""
    one, two = await sharing.member(worker), await sharing.member(worker)
    with caplog.at_level(logging.WARNING):
        other = await sharing.member(worker, joins_with="other keys")
        await see_each_other(one, two, other)
        await two.until(lambda: state_of(two).members.strangers == [other.url])
    assert "its own TIDEGATE_STATE__PREFIX" in caplog.text
    two.parts.health.refresh()
    assert (await ready_of(two))[1]["state"]["strangers"] == [other.url]
    await running(one, worker)
    freeze(one)
    await two.until(lambda: state_of(two).taken == 1)
    assert state_of(other).taken == 0


async def test_a_deadline_moves_by_the_stores_clock(sharing: Sharing, worker: FakeWorker) -> None:
    """Between machines whose wall clocks are five seconds apart."""
    one, two = await sharing.member(worker), await sharing.member(worker)
    ahead = one.clock.unix
    one.clock.unix = state_of(one).members._unix = lambda: ahead() + 5.0
    one.journal.boot = Boot("another machine's", lambda: 1.0)
    await one.until(lambda: state_of(one).tasks.skew_s < -4.5)
    await see_each_other(one, two)
    task_id = await running(one, worker, deadline_ms=60_000)
    (task,) = one.orchestrator.live()
    due_s = task.deadline.at - one.clock.now()
    freeze(one)
    worker.plan = lambda job: Plan(stall_at=6)
    await two.until(lambda: state_of(two).taken == 1)
    (moved,) = two.orchestrator.live()
    assert moved.id == task_id
    # Half of a round trip, and what the test has taken meanwhile, which both clocks share.
    assert moved.deadline.at - task.deadline.at == pytest.approx(0.0, abs=1.0), due_s


async def test_who_had_died_no_longer_counts_as_running(
    sharing: Sharing, worker: FakeWorker
) -> None:
    """The limit of requests in progress holds for those that live."""
    one, two = await sharing.members(worker, limits__each_key__concurrent=2)
    held = worker.does(Plan(stall_at=1))
    assert [(await submit(one, durable=False))[0] for _ in range(2)] == [202, 202]
    assert (await submit(two, durable=False))[0] == 429
    freeze(one)
    await two.until(lambda: is_dead(two, one))
    statuses = [(await submit(two, durable=False))[0] for _ in range(3)]
    assert statuses == [202, 202, 429]
    held.release.set()


async def test_tokens_of_a_request_that_was_not_queued_are_given_back(
    sharing: Sharing, make_worker: MakeWorker
) -> None:
    """One that the queue had no room for has used none."""
    worker = await make_worker(max_running=1)
    one = await sharing.member(
        worker, limits__each_key__tokens_per_min=600, queue__max_waiting=0, MOST_BACKLOG=0
    )
    held = worker.does(Plan(stall_at=1))
    assert (await submit(one, durable=False, max_tokens=2))[0] == 202
    await one.until_tokens(1)
    status, answer = await submit(one, durable=False, max_tokens=320)
    assert status == 429 and answer["error"]["code"] == "queue_full"
    counting = state_of(one).limits
    assert counting is not None
    await one.until(lambda: counting._flushing is None and not counting._unused)
    held.release.set()
    await one.until(lambda: not one.orchestrator.live_tasks)
    assert (await submit(one, durable=False, max_tokens=320))[0] == 202


async def test_the_store_hears_of_limits_once_for_all_while_it_hangs(
    sharing: Sharing, worker: FakeWorker, network: RoughNetwork
) -> None:
    """One wait for all requests that are there; those that come later do not wait."""
    one = await sharing.member(
        worker, state__url=sharing.far_url, LEASE_S=5.0, limits__each_key__requests_per_min=1000
    )
    asked = 0
    client = state_of(one).members.client
    ask = client.eval

    async def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return await ask(*arguments)

    client.eval = counted  # type: ignore[method-assign]
    network.partition()
    statuses = await asyncio.gather(*(submit(one, durable=False) for _ in range(5)))
    assert [status for status, _ in statuses] == [202] * 5
    waited = asked
    assert waited <= 5 and (await submit(one, durable=False))[0] == 202 and asked == waited
    network.heal()
    counting = state_of(one).limits
    assert counting is not None and counting.alone == 6
    await one.until(lambda: state_of(one).members.prompt_renewal > counting._failed_in)
    assert (await submit(one, durable=False))[0] == 202 and asked == waited + 1
