"""``make soak``: every kind of request for an hour, paced: text and durable tasks among cancels,
dropped connections, mistakes and short deadlines, and each route of each API in turn. It checks
that nothing grows, and that every answer stays correct to the end.

Three limits are small: the ended tasks that an orchestrator keeps, the traffic of a lane before its
renewal, and the worker's KV pool. In the first tenth, clients ask without a pause, so that every
bounded buffer is full by its end (also the journal's page cache, after some thousand durable
tasks). Growth counts from the second tenth on.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from perf.chaos import checks
from perf.chaos.clients import ChaosLedger, SteadyClients
from perf.chaos.every_kind import EveryKind
from perf.chaos.world import World, orchestrating
from perf.load.connection import HOST
from perf.load.usage import PARTS, Looks, ServerUsage
from perf.report.stats import median
from perf.stack.scrape import scrape
from perf.stack.stack import StackSpec, tritons

TROUBLE: Final = ("cancelled", "dropped", "bad", "late")
_WORDS: Final = tuple(
    "the old sailor saw a small fox in garden under tree and told it many long tales".split()  # noqa: SIM905
)
_ENDS_AFTER_EVENTS: Final = 6


@dataclass(slots=True)
class BadClient:
    """Sends one request after the other; a wrong answer is a fault in the ledger."""

    http: aiohttp.ClientSession
    url: str
    ledger: ChaosLedger
    rng: random.Random

    async def visit(self) -> None:
        """Send one request, of any kind."""
        kind = self.rng.choice(TROUBLE)
        try:
            outcome = await self._visit(kind)
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome = type(error).__name__
        if outcome != "right":
            self.ledger.fault(f"a {kind} request came to {outcome}")
        self.ledger.ended(kind, "met" if outcome == "right" else outcome)

    async def _visit(self, kind: str) -> str:
        match kind:
            case "cancelled":
                return await self._cancelled()
            case "dropped":
                return await self._dropped()
            case "bad":
                body = self._body() | self.rng.choice(
                    ({"max_tokens": -1}, {"prompt": 7}, {"temperature": "hot"}, {"top_p": 2})
                )
                return await self._status("/v1/completions", body, {400})
            case _:  # late: may be refused, cut off, or just in time
                body = self._body() | {"max_tokens": 400}
                headers = {"X-Timeout-Ms": str(self.rng.randrange(15, 400))}
                return await self._status("/v1/completions", body, {200, 504}, headers)

    async def _status(
        self, path: str, body: dict[str, Any], right: set[int], headers: Any = None
    ) -> str:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            said = await response.text()
            return "right" if response.status in right else f"{response.status} {said[:200]}"

    async def _cancelled(self) -> str:
        """Cancel a task while it runs; the server must confirm it."""
        body = self._body() | {"max_tokens": 400, "durable": self.rng.random() < 0.5}
        async with self.http.post(f"{self.url}/v2/tasks", json=body) as response:
            if response.status != 202:
                return f"{response.status} {(await response.text())[:200]}"
            task = f"{self.url}/v2/tasks/{(await response.json())['task_id']}"
        await self._some_events(self.http.get(f"{task}/events"))
        async with self.http.delete(task) as response:
            return "right" if response.status < 300 else str(response.status)

    async def _dropped(self) -> str:
        """Drop a stream's connection without a cancel."""
        body = self._body() | {"max_tokens": 400, "stream": True}
        await self._some_events(self.http.post(f"{self.url}/v1/completions", json=body))
        return "right"

    async def _some_events(self, asked: Any) -> None:
        async with asked as response:
            seen = 0
            async for line in response.content:
                seen += line.startswith(b"data:")
                if seen >= _ENDS_AFTER_EVENTS:
                    break
            response.close()

    def _body(self) -> dict[str, Any]:
        prompt = self._words(self.rng.randrange(3, 60))
        return {"model": "demo", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}

    def _words(self, count: int) -> str:
        return " ".join(self.rng.choice(_WORDS) for _ in range(count))


SPEC: Final = StackSpec("torch", deterministic=True, kv_blocks=256)
PAUSE_S: Final = 2.0
"""Mean pause in seconds between an answer and the client's next request, after the first tenth of
the run."""
SILENT_S: Final = 80.0
"""Seconds of silence allowed: on a busy machine a whole answer, sent in one piece, may take
long."""
BAD_EVERY_S: Final = 4.0
BUSY_BAD_EVERY_S: Final = 0.5
"""Mean pause in seconds between two requests of a bad client in the first tenth."""
MAX_GROWTH: Final = 0.05
"""Largest growth of resident memory, as a share, from the second tenth to the last (WK-9)."""
_CONSTANTS: Final = {
    "orchestrator.build.KEPT_TASKS": {"keep_count": 100, "keep_s": 60.0},
    "orchestrator.api.openai.responses.store.KEPT_RESPONSES": {"keep_count": 20, "keep_s": 60.0},
    "orchestrator.prediction.answer_length._MAX_NODES": 64,
    "orchestrator.prediction.answer_length._MAX_AT_HAND": 64,
    "orchestrator.lanes.config.RENEW_AFTER_BYTES": 2 * 2**20,
    # A soak may share the machine; a process that waits for a CPU is not dead.
    "orchestrator.lanes.config.SUSPECT_AFTER_S": 10.0,
    "orchestrator.lanes.config.DOWN_AFTER_S": 30.0,
}
_COUNTS: Final = {"fds": 2, "threads": 2}
"""Allowed growth from the minimum of the second tenth to the minimum of the last."""


@dataclass(slots=True)
class Soak:
    """Findings of a soak. The parts in ``looks`` are orchestrator, Triton and worker."""

    ledger: ChaosLedger
    looks: Looks = field(default_factory=Looks)
    journal: checks.JournalFacts | None = None
    kept: list[dict[str, float]] = field(default_factory=list)
    """Bytes that the orchestrator keeps from earlier requests, by holder, each minute."""


async def run(seconds: float, seed: int) -> Soak:
    """Soak a new Triton and a new orchestrator. Raises ``ProvisionError`` if one of them cannot be
    started."""
    ledger = ChaosLedger(round="soak")
    found = Soak(ledger)
    async with (
        tritons(SPEC, 1) as instances,
        orchestrating([[instances[0].grpc_address]], constants=_CONSTANTS) as (
            orchestrators,
            journals,
        ),
    ):
        world = World(instances, orchestrators, journals)
        pids = world.pids()
        ledger.memory_prefixes |= world.memory_prefixes()
        load = SteadyClients(world, ledger, seed, pause_s=0.0, silent_s=SILENT_S)
        await load.start(1)

        def look() -> dict[str, ServerUsage]:
            return {part: ServerUsage.of_each(pids) for part, pids in world.parts().items()}

        async def weigh() -> None:
            while True:
                kept = await scrape(HOST, orchestrators[0].port)
                found.kept.append(kept.by("tidegate_kept_bytes", "holder"))
                await asyncio.sleep(60.0)

        weighing = asyncio.create_task(weigh())
        begun, rng = time.monotonic(), random.Random(f"bad clients {seed}")
        async with found.looks.looking(look):
            await _more(world, ledger, rng, BUSY_BAD_EVERY_S, begun + seconds / PARTS)
            load.pause_s = PAUSE_S
            await _more(world, ledger, rng, BAD_EVERY_S, begun + seconds)
            await load.stop()
        weighing.cancel()
        await checks.close(world, ledger)
        if pids != world.pids():
            ledger.faults.append("a process was replaced while nothing was done to any")
        for process in orchestrators:
            await process.stop(5.0)
        found.journal = checks.read_journals(journals, ledger)
    await asyncio.sleep(0.5)
    checks.judge_leaks(pids, ledger)
    judge_answers(ledger)
    judge_growth(found)
    return found


async def _more(
    world: World, ledger: ChaosLedger, rng: random.Random, every_s: float, until: float
) -> None:
    """Send a bad request every ``every_s``, and good ones of each kind eight times as often."""
    url, timeout = world.orchestrators[0].url, aiohttp.ClientTimeout(total=60.0)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:

        async def visit_on(client: BadClient | EveryKind, pause_s: float) -> None:
            while (left := until - time.monotonic()) > 0:
                group.create_task(client.visit())
                await asyncio.sleep(min(left, rng.uniform(0.0, 2 * pause_s)))

        group.create_task(visit_on(BadClient(http, url, ledger, rng), every_s))
        group.create_task(visit_on(EveryKind(http, url, ledger, rng), every_s / 8))


def judge_answers(ledger: ChaosLedger) -> None:
    """Check that every request is met and none refused, because there were no faults."""
    for counts in ledger.outcomes.values():
        for (kind, outcome), count in counts.items():
            if outcome != "met":
                ledger.faults.append(f"soak: {count} {kind} requests came to {outcome}")
    if ledger.refusals:
        ledger.faults.append(f"soak: {ledger.refusals} requests were refused")


def judge_growth(found: Soak) -> None:
    """Add a fault for each measure that has grown."""
    looks = found.looks
    for part in looks.taken[0][1]:
        second, last = looks.tenth(part, 1), looks.tenth(part, PARTS - 1)
        before, after = looks.growth(part, "rss_mib")
        if after > before * (1 + MAX_GROWTH):
            found.ledger.faults.append(
                f"soak: {part}'s memory grew from {before:.1f} to {after:.1f} MiB"
            )
        for name, allowed in _COUNTS.items():
            least = [min(getattr(look, name) for look in each) for each in (second, last)]
            if least[1] > least[0] + allowed:
                found.ledger.faults.append(
                    f"soak: {part}'s {name} grew from {least[0]} to {least[1]}"
                )


@dataclass(frozen=True, slots=True)
class PartRow:
    """One process by tenths of the run."""

    part: str
    rss_mib: list[float]
    """Median of each tenth."""
    growth_percent: float
    """Growth from the second tenth to the last."""
    fds: list[int]
    """Fewest open files in each tenth."""
    threads: list[int]


def rows_of(found: Soak) -> list[PartRow]:
    rows = []
    for part in found.looks.taken[0][1]:
        tenths = [found.looks.tenth(part, number) for number in range(PARTS)]
        rss = [round(median([look.rss_mib for look in each]), 2) for each in tenths]
        rows.append(
            PartRow(
                part,
                rss,
                round(100 * (rss[-1] / rss[1] - 1), 2),
                [min(look.fds for look in each) for each in tenths],
                [min(look.threads for look in each) for each in tenths],
            )
        )
    return rows
