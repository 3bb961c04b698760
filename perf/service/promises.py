"""Promises on a full service, counted on a real Triton: requests that must still be answered.

The engine is ``synthetic-paced`` with a step of 20 ms and 64 slots; long work occupies each slot
for half a minute. A count that breaks a promise fails the benchmark, and so the gate. The result
depends neither on the machine's speed nor on a recorded run.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from perf.load.connection import HOST
from perf.load.drive import PATH
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.scrape import scrape, until_running
from perf.stack.stack import StackSpec

SLOTS = 64
STEP_MS = 20.0
_LONG, _SHORT = 1500, 5
"""Tokens of a long and of a short answer."""
_PATIENT_MS = 1_700_000.0
_URGENT_MS = (3000.0, 4000.0, 5000.0, 6500.0, 8000.0, 10_000.0)
"""Deadlines far below the time until a slot falls free by itself."""


@dataclass(frozen=True, slots=True)
class _Client:
    """A client that asks as any tenant of a service without keys."""

    http: aiohttp.ClientSession
    model: str
    port: int
    submitted: list[str] = field(default_factory=list)
    """Ids of the tasks that were accepted."""

    async def submit(self, count: int, **changes: object) -> None:
        """Submit ``count`` long tasks, whether they are accepted or not."""
        body = {"model": self.model, "prompt": "x", "max_tokens": _LONG, "ignore_eos": True}
        body |= {"deadline_ms": _PATIENT_MS} | changes
        for _ in range(count):
            async with self.http.post("/v2/tasks", json=body) as response:
                if response.status == 202:
                    self.submitted.append((await response.json())["task_id"])

    async def answered(self, tenant: str = "calm") -> int:
        """Number of urgent requests, sent one after the other, that are answered in time."""
        answered = 0
        for deadline_ms in _URGENT_MS:
            body = {
                "model": self.model,
                "prompt": "now",
                "max_tokens": _SHORT,
                "ignore_eos": True,
                "deadline_ms": deadline_ms,
                "tenant": tenant,
            }
            async with self.http.post(PATH, json=body) as response:
                await response.read()
                answered += response.status == 200
        return answered

    async def is_ready(self) -> bool:
        """Whether the service reports readiness, at least a second from now."""
        await asyncio.sleep(1.0)
        async with self.http.get("/health/ready") as response:
            return response.status == 200

    async def cancel_all(self) -> None:
        """End all that was submitted; returns once the service is idle."""
        for task_id in self.submitted:
            async with self.http.delete(f"/v2/tasks/{task_id}") as response:
                await response.read()
        while True:
            if (await scrape(HOST, self.port)).is_idle:
                return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _client(context: BenchContext) -> AsyncIterator[_Client]:
    """A client of a service that is idle now; what it leaves there is cancelled."""
    spec = StackSpec("synthetic-paced", device=context.device, step_ms=STEP_MS, max_running=SLOTS)
    stack = await context.stack(spec)
    assert context.card is not None
    async with aiohttp.ClientSession(f"http://{HOST}:{stack.port}") as http:
        client = _Client(http, context.card.model, stack.port)
        try:
            yield client
        finally:
            await client.cancel_all()


async def overtaking(context: BenchContext) -> list[Figure]:
    """Urgent requests among batch work in every slot, and then in the queue too (DL-19)."""
    async with _client(context) as client:
        await client.submit(SLOTS, priority="batch")
        await until_running(client.port, SLOTS)
        beside = await client.answered("default")
        await client.submit(112, priority="batch")
        behind = await client.answered("default")
    return _promised(
        ("overtaking.slots", "urgent requests met among 64 batch tasks", beside),
        ("overtaking.queue", "and with a full queue of them", behind),
    )


async def flood(context: BenchContext) -> list[Figure]:
    """One tenant asks for more than slots and queue hold, another one for little (OR-24, OR-13)."""
    async with _client(context) as client:
        await client.submit(167, priority="batch", tenant="loud")
        await until_running(client.port, SLOTS)
        ready = await client.is_ready()
        batch = await client.answered()
        await client.submit(150, tenant="loud")
        interactive = await client.answered()
        if not ready:
            raise RuntimeError("a service that lets others in said that it is not ready")
    return _promised(
        ("flood.batch", "met of one tenant during another's flood of batch work", batch),
        ("flood.interactive", "and during one of interactive work", interactive),
    )


def _promised(*found: tuple[str, str, int]) -> list[Figure]:
    """Figures of counts. Raises ``RuntimeError`` unless every request asked was answered."""
    asked = len(_URGENT_MS)
    short = [f"{label}: {count} of {asked}" for _, label, count in found if count < asked]
    if short:
        raise RuntimeError("; ".join(short))
    return [
        Figure.of(key, label, f"of {asked}", [float(count)], better="higher")
        for key, label, count in found
    ]


OVERTAKING = Bench(
    "overtaking", "urgent requests among batch work", overtaking, limit_s=90, is_promise=True
)
FLOOD = Bench("flood", "one tenant floods, another asks", flood, limit_s=90, is_promise=True)
