"""OR-23, OR-5: a client that comes back while its task waits for its model gets each event once, in
order, whatever becomes of the task then.

Each test holds the lane shut: the worker is gone until the follower listens.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.api.native.events import TaskEvents
from tests.orchestrator.conftest import MakeWorker, Service
from tests.orchestrator.tasks.journal.conftest import (
    Restarts,
    events_of,
    recovered,
    running,
    speaking,
    status_of,
    task_of,
    until_journalled,
)
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sse import Event
from tests.support.steady_loop import advance

END_OF_TEXT = 1
EVERYTHING = list(range(13))
"""Numbers of the events of a text of ten tokens: ``queued``, ``started``, the tokens, the end."""
BACK_WITH = ("", "3", "5", "7")
"""What a client has that comes back: nothing, a part of what was journalled, all of it, and two
events more, which were sent and not journalled."""


def numbers(events: list[Event]) -> list[int]:
    return [int(event.id) for event in events]


def text_of(events: list[Event]) -> str:
    return "".join(event.json()["text"] for event in events if event.event == "token")


async def until_followed(service: Service, task_id: str, by: int = 1) -> None:
    """So many clients listen to the task."""
    task = service.orchestrator.store.get(task_id)
    await service.until(lambda: sum(isinstance(one, TaskEvents) for one in task.listeners) == by)


async def restarted(
    restarts: Restarts, service: Service, worker: FakeWorker, task_id: str
) -> Service:
    """Kill the orchestrator, and start the next one in front of a closed port."""
    await restarts.die()
    service.orchestrator.cancel(service.orchestrator.store.get(task_id))  # the dead do nothing more
    await worker.stop()
    return await restarts.start(worker, wait=False)


class Following:
    """Clients of one task that came back before its model was there, by what they had."""

    def __init__(self, clients: dict[str, "asyncio.Task[list[Event]]"]) -> None:
        self._clients = clients

    async def get_each_once(self, whole: list[int]) -> list[Event]:
        """Wait for their streams to end: each has got what it lacked of ``whole``. Returns the
        events of the one that had nothing."""
        for after, client in self._clients.items():
            had = int(after or -1)
            assert numbers(await client) == [number for number in whole if number > had], after
        return await self._clients[""]


@asynccontextmanager
async def coming_back(
    restarts: Restarts, service: Service, worker: FakeWorker, task_id: str
) -> AsyncIterator[tuple[Service, Following]]:
    """Kill the orchestrator, start the next one in front of a closed port, and come back."""
    again = await restarted(restarts, service, worker, task_id)
    clients = {
        after: asyncio.create_task(events_of(again, task_id, after=after)) for after in BACK_WITH
    }
    await until_followed(again, task_id, by=len(BACK_WITH))
    yield again, Following(clients)


@pytest.mark.parametrize(
    ("terms", "card", "shift", "how"),
    [
        ({}, {}, 0, "continued"),
        ({"stop": ["zz"]}, {"can_continue": True}, 0, "continued"),
        ({"logprobs": 1}, {}, 0, "remade"),
        # Other weights, and a client to whom another text is welcome.
        ({"idempotent": True}, {"model_digest": "other"}, 1, "repeated"),
    ],
    ids=str,
)
async def test_or23_a_text_goes_on_and_has_each_number_once(
    restarts: Restarts,
    worker: FakeWorker,
    make_worker: MakeWorker,
    terms: dict[str, Any],
    card: dict[str, Any],
    shift: int,
    how: str,
) -> None:
    service = await restarts.start(worker)
    task_id = await running(service, worker, **terms)
    async with coming_back(restarts, service, worker, task_id) as (again, following):
        back = await make_worker(port=worker.port, **card)
        back.does(speaking(service, shift=shift))
        events = await following.get_each_once(EVERYTHING)
    said = service.orchestrator.models.resolve("").tokens.text_of(range(73 + shift, 83 + shift))
    assert text_of(events) == said
    assert events[-1].event == "end" and recovered(again) == {how: 1}
    if how == "remade":  # and held against what was there
        (first,), (second,) = worker.submits, back.submits
        assert second.token_ids == first.token_ids and second.sampling == first.sampling
        assert second.sampling.seed is not None


async def test_or23_a_text_that_is_whole_in_the_journal_is_told_whole(
    restarts: Restarts, worker: FakeWorker, make_worker: MakeWorker
) -> None:
    """It lacks nothing but the word of its worker, and no worker says anything of it any more."""
    service = await restarts.start(worker)
    letters = service.orchestrator.models.resolve("").tokens
    said = [*((70 + at, letters.text_of([70 + at])) for at in range(3)), (END_OF_TEXT, "")]
    worker.does(Plan(stall_at=4, speak=lambda at: said[at - 3]))
    task_id = await task_of(service, prompt=None, prompt_token_ids=[70] * 3, max_tokens=8)
    await until_journalled(service, 4)
    async with coming_back(restarts, service, worker, task_id) as (again, following):
        back = await make_worker(port=worker.port)
        events = await following.get_each_once(list(range(7)))
    assert events[-1].event == "end" and not back.submits
    assert recovered(again) == {"continued": 1}


@pytest.mark.parametrize(
    ("terms", "model", "last"),
    [
        ({}, {"model_digest": "other"}, "error"),
        ({}, {"context_tokens": 8}, "error"),
        ({"on_deadline": "partial"}, None, "end"),
    ],
    ids=["other weights", "less context", "past its deadline, partial"],
)
async def test_or23_a_text_that_cannot_go_on_is_told_before_its_end(
    restarts: Restarts,
    worker: FakeWorker,
    make_worker: MakeWorker,
    terms: dict[str, Any],
    model: dict[str, Any] | None,
    last: str,
) -> None:
    """Its end is behind every number that was ever sent. ``model``: what comes back, if any."""
    service = await restarts.start(worker)
    task_id = await running(service, worker, deadline_ms=60_000, **terms)
    async with coming_back(restarts, service, worker, task_id) as (again, following):
        if model is None:
            advance(60)
        else:
            await make_worker(port=worker.port, **model)
        events = await following.get_each_once([0, 1, 2, 3, 4, 5, 14])
    assert events[-1].event == last
    if last == "error" and model is not None and "model_digest" in model:
        error = events[-1].json()
        assert error["retryable"] and "weights" in error["message"]
        assert recovered(again) == {"failed": 1}
    status = await status_of(again, task_id)
    assert status["usage"]["completion_tokens"] == 4 and status["text"]
    if model is None:
        assert status["outcome"] == "partial"


@pytest.mark.parametrize("plan", [{"shift": 1, "per_delta": 8}, {"tokens": 2}], ids=str)
async def test_or23_a_text_that_comes_out_differently_is_not_told(
    restarts: Restarts, worker: FakeWorker, make_worker: MakeWorker, plan: dict[str, Any]
) -> None:
    """Nobody gets what differs, nor what follows in the same message; nor is a shorter one met."""
    service = await restarts.start(worker)
    task_id = await running(service, worker, stop=["zz"])
    async with coming_back(restarts, service, worker, task_id) as (again, following):
        back = await make_worker(port=worker.port)
        back.does(speaking(service, **plan))
        events = await following.get_each_once([0, 1, 2, 3, 4, 5, 14])
    assert text_of(events) == service.orchestrator.models.resolve("").tokens.text_of(range(73, 77))
    assert events[-1].json()["code"] == "instance_lost"
    assert recovered(again) == {"remade": 1}
