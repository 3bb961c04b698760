"""WP-1, LB-4: clients that go at the same moment do not hold up everybody else."""

import asyncio
from functools import partial

import aiohttp

from orchestrator.api.http.hang_ups import PER_PASS, Losses
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker, Plan


async def test_few_are_let_go_at_once() -> None:
    losses, gone = Losses(asyncio.get_running_loop()), list[int]()
    for number in range(PER_PASS):
        losses.add(partial(gone.append, number))
    assert gone == list(range(PER_PASS))
    await asyncio.sleep(0)  # another pass, another few
    losses.add(partial(gone.append, PER_PASS))
    assert len(gone) == PER_PASS + 1


async def test_many_go_in_order_and_a_few_in_each_pass() -> None:
    losses, gone = Losses(asyncio.get_running_loop()), list[int]()
    many = 5 * PER_PASS + 3
    for number in range(many):
        losses.add(partial(gone.append, number))
    before, passes = len(gone), 0
    while len(gone) < many:
        await asyncio.sleep(0)
        assert len(gone) - before <= PER_PASS
        before, passes = len(gone), passes + 1
        if passes == 2:  # it comes behind those that wait
            losses.add(partial(gone.append, many))
            many += 1
    assert gone == list(range(many))


async def test_wp1_a_crowd_that_goes_at_once_leaves_nothing(
    service: Service, worker: FakeWorker
) -> None:
    """WP-1, DL-10: every job is stopped, every task has one outcome (the fixture counts them)."""
    crowd = 3 * PER_PASS
    worker.plan = lambda submit: Plan(stall_at=1)
    body = {"model": "fake", "prompt": "a", "max_tokens": 2, "stream": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        posts = [http.post(f"{service.url}/v1/completions", json=body) for _ in range(crowd)]
        responses = await asyncio.gather(*posts)
        await worker.until(lambda: worker.running == crowd)
        for response in responses:
            response.close()
        await worker.until(lambda: worker.running == 0)
    await service.until(lambda: len(service.ends) == crowd)
    assert service.outcomes() == ["aborted"] * crowd
