"""What chaos is made of: lanes that can be shut, and what a round may cost."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from perf.chaos import polls
from perf.chaos.batches import BatchOrder, Sent
from perf.chaos.checks import judge_rounds
from perf.chaos.clients import ChaosLedger
from perf.chaos.polls import Polls
from perf.chaos.world import World
from tests.support.cases import for_each


def test_what_a_death_has_broken_may_come_to_light_one_round_later_and_no_more() -> None:
    ledger = ChaosLedger(
        outcomes={
            "1 kill": Counter({("plain", "broken"): 2, ("durable", "met"): 3}),
            "2 pause": Counter({("plain", "broken"): 1, ("plain", "instance_lost"): 1}),
            "3 pause": Counter({("plain", "broken"): 1}),
        }
    )
    dies, nobody = frozenset({"broken", "gone"}), frozenset[str]()
    judge_rounds(ledger, [("1 kill", dies), ("2 pause", nobody), ("3 pause", nobody)])
    assert ledger.faults == [
        "2 pause: 1 plain requests came to instance_lost",
        "3 pause: 1 plain requests came to broken",
    ]


async def faults_of_polls(status: int, waits: bool, is_still: bool) -> list[str]:
    asked: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        kind = request.path.split("/")[1]
        asked[kind] += 1
        if asked[kind] > 1:  # of each kind one is judged, and the others refused
            request.transport.abort()  # type: ignore[union-attr]
        if waits:
            await asyncio.Event().wait()
        return web.Response(status=status if kind == "v2" else 200)

    runner = web.ServerRunner(web.Server(answer, handler_cancellation=True))  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    process: Any = SimpleNamespace(url=url, pid=1, name="one")
    world = World([], [process], (), still={1: float("inf")} if is_still else {})
    ledger = ChaosLedger(durable_ids=["a-task"])
    polling = Polls(world, ledger, task_within_s=0.5)
    polling.start(1)
    while min(asked["health"], asked["v2"]) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await polling.stop()
    await runner.cleanup()
    return ledger.faults


async def test_a_poll_may_be_refused_but_not_left_waiting_nor_told_that_a_task_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polls, "WITHIN_S", 0.5)
    cases = ((200, False, False), (404, False, False), (200, True, False), (200, True, True))
    found = await asyncio.gather(*(faults_of_polls(*case) for case in cases))
    assert [len(faults) for faults in found] == [0, 1, 2, 0], found


ORDER = BatchOrder("a", 4, refused_every=4)
ENTRIES = [("a-1", "succeeded"), ("a-2", "succeeded"), ("a-3", "succeeded"), ("a-4", "errored")]
STATE = {
    "status": "completed",
    "request_counts": {"total": 4, "completed": 3, "failed": 1},
    "errors": None,
}


def test_a_batch_is_right_when_every_line_has_the_one_entry_that_it_must_have() -> None:
    sent = Sent(ORDER, "batch_1", "file-1", STATE)
    sent.judge(iter(ENTRIES))
    assert sent.faults == []


@for_each(
    ("entries", "faults"),
    [
        (ENTRIES[1:], ["1 lines are missing", "its counts are"]),
        ([*ENTRIES, ENTRIES[0]], ["1 lines are doubled", "its counts are"]),
        ([*ENTRIES, ("b-1", "succeeded")], ["the line 'b-1' is succeeded, not None", "its counts"]),
        ([*ENTRIES[:3], ("a-4", "succeeded")], ["'a-4' is succeeded, not errored", "its counts"]),
        ([("a-1", "expired"), *ENTRIES[1:]], ["'a-1' is expired", "its counts"]),
    ],
)
def test_what_is_wrong_with_a_batch_is_said(
    entries: list[tuple[str, str]], faults: list[str]
) -> None:
    sent = Sent(ORDER, "batch_1", "file-1", STATE)
    sent.judge(iter(entries))
    assert len(sent.faults) == len(faults)
    assert all(part in fault for part, fault in zip(faults, sent.faults, strict=True))
