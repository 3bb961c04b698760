"""Two instances under load, and what can befall them: every request ends in exactly one outcome,
every slot comes back, and the service is well again (DL-10, WK-4, OR-6)."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from tests.support.stack import DOWN_AFTER_S, Orchestrator, Triton, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLIENTS = 8
PATH = "/v1/completions"
SHORT = {"model": "demo", "prompt": "Time", "max_tokens": 30, "ignore_eos": True, "stream": True}
"""0.6 s at the pace of the engine."""


@dataclass
class Pair:
    """Two Tritons behind one orchestrator."""

    first: Triton
    second: Triton
    orchestrator: Orchestrator

    def up(self) -> int:
        return round(self.orchestrator.metric("tidegate_instance_state", state="up"))

    def assert_well(self) -> None:
        """Both instances up and empty, one outcome per request, ready."""
        metric = self.orchestrator.metric

        def well() -> bool:
            blocks = {kind: metric("tidegate_kv_blocks", kind=kind) for kind in ("used", "free")}
            return (
                self.up() == 2
                and blocks["used"] == 0
                and blocks["free"] == metric("tidegate_kv_blocks", kind="total") > 0
                and metric("tidegate_worker_jobs") == 0
                and metric("tidegate_instance_load") == 0
                and metric("tidegate_queue_depth") == 0
            )

        eventually(well, "both instances to be up and empty")
        eventually(
            lambda: metric("tidegate_offered_total") == metric("tidegate_outcomes_total"),
            "every request to have exactly one outcome",
        )
        assert self.orchestrator.status("/health/ready") == 200


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    paced = {"engine": "synthetic-paced", "min_start_budget_ms": 20}
    first, second = Triton(**paced), Triton(**paced)
    try:
        with ThreadPoolExecutor(2) as starters:
            list(starters.map(Triton.start, (first, second)))
        orchestrator = Orchestrator(
            f"{first.grpc},{second.grpc}",
            queue__max_waiting=-1,
            # What is killed closes its connections. What is only silent stays suspect.
            **{DOWN_AFTER_S: 60},
        )
        made = Pair(first, second, orchestrator)
        with running(orchestrator):
            eventually(lambda: made.up() == 2, "both instances to be up")
            yield made
    finally:
        first.close()
        second.close()


@pytest.fixture(autouse=True)
def well_afterwards(pair: Pair) -> Iterator[None]:
    yield
    pair.assert_well()


async def ask(http: aiohttp.ClientSession, **changes: object) -> str:
    """One streamed completion; how it ended: ``length``, or an error's code."""
    async with http.post(PATH, json=SHORT | changes) as response:
        if response.status != 200:
            return str((await response.json())["error"]["code"])
        text = await response.text()
    events = [event for event in text.split("\n\n") if event.startswith("data: ")]
    terminal = [e for e in events if '"error":{' in e or e == "data: [DONE]"]
    assert len(terminal) == 1 and events[-1] == terminal[0], "not exactly one terminal event"
    return (
        "length" if events[-1] == "data: [DONE]" else events[-1].split('"code":"')[1].split('"')[0]
    )


@asynccontextmanager
async def load(pair: Pair, ends: Counter[str], **changes: object) -> AsyncIterator[None]:
    """Clients that ask again and again while the body runs, and how their requests end."""
    going = True

    async def one(http: aiohttp.ClientSession) -> None:
        while going:
            ends[await ask(http, **changes)] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(pair.orchestrator.url, connector=connector) as http:
        clients = [asyncio.create_task(one(http)) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            going = False
            await asyncio.gather(*clients)


async def until(condition: object, what: str) -> None:
    await asyncio.to_thread(eventually, condition, what)  # type: ignore[arg-type]


async def test_one_of_two_stops_answering(pair: Pair) -> None:
    """OR-6: SIGSTOP, a grey failure: the connection lives, nothing comes. Deadlines hold for those
    who wait there, and nobody else is sent.

    Server and stub stop together, as on a frozen machine: when the stub stops alone, Triton 2.51
    sooner or later aborts over the lock in shared memory that it holds (seen).
    """
    ends: Counter[str] = Counter()
    pids = (pair.first.stub_pid, pair.first.server_pid)
    held = "tidegate_instance_load"
    async with load(pair, ends, deadline_ms=5000):
        await until(lambda: ends["length"] >= CLIENTS, "the load to run")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: pair.up() == 1, "the silent one to be suspected")
            there = pair.orchestrator.metric(held, instance=pair.first.grpc)
            before = ends["length"]
            await until(lambda: ends["length"] >= before + 4 * CLIENTS, "the other one to go on")
            assert pair.orchestrator.metric(held, instance=pair.first.grpc) <= there
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await until(lambda: pair.up() == 2, "it to come back")
    assert set(ends) <= {"length", "deadline_exceeded", "deadline_infeasible"}, ends
