"""Explanations, through the client and the command, before a real orchestrator."""

import pytest

import tidegate
from tests.client.test_commands import Ask
from tests.client.test_commands import ask as ask
from tests.client.test_sync import plainly
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker, Plan
from tidegate import Client, SyncClient


async def test_a_miss_is_explained(service: Service, worker: FakeWorker, ask: Ask) -> None:
    worker.plan = lambda submit: Plan(stall_at=2)
    async with Client(service.url) as client:
        task = (await client.submit("hi", max_tokens=400, deadline=300, ignore_eos=True)).task_id
        await service.until(lambda: service.outcomes() == ["missed"])
        found = await client.explain(task)
    assert found.outcome == "missed" and found.replay is not None and found.replay.reproduced
    assert [change.change for change in found.would_have_met] == ["later_deadline"]
    assert found.timeline[0].event == "arrived"
    status, out, err = await ask("explain", task)
    assert (status, err) == (0, "")
    assert f"{task}: missed" in out and "a deadline " in out
    assert "would not have: nobody else beside it; one more instance" in out


async def test_what_was_met_or_is_not_known_is_said(service: Service, ask: Ask) -> None:
    async with Client(service.url) as client:
        task = (await client.submit("hi", max_tokens=3)).task_id
        await service.until(lambda: service.outcomes() == ["met"])
        found = await client.explain(task)
        assert found.verdict is None and found.reason.startswith("It was met")
        with pytest.raises(tidegate.NotFound):
            await client.explain("none")

    def work(client: SyncClient) -> None:
        assert client.explain(task).outcome == "met"

    await plainly(work, service.url)
    status, out, err = await ask("explain", "none")
    assert (status, out) == (1, "") and "tidegate explain:" in err
