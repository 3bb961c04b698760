"""``python -m perf.chaos.batches``: one batch of many lines on the real stack, whose orchestrator
is killed again and again: while it checks the lines, serves them, starts, and closes the batch's
files (OR-20). Then a batch of a fifth as many lines is served by one process, whose memory must
not grow.

Exits with 1 unless every line of every batch has exactly one entry, of the right kind and in the
right file, what is told of a batch is what its files hold, and both outlive one more kill.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from catalog.errors import StartFailed
from perf.chaos.batch_checks import BatchClient, BatchOrder, Sent
from perf.chaos.world import READY_S, alive, orchestrating
from perf.load.usage import ServerUsage
from perf.report.command import begin, new_console, new_parser, status_of
from perf.stack.stack import StackSpec, tritons
from pool.units.orchestrator import OrchestratorProcess

KEY = "many"
MAX_GROWTH: Final = 0.05
"""Largest growth of resident memory, as a share, from the second tenth of the lines to the last
that one process serves."""
_LOOK_EVERY_S: Final = 0.25
_PARTS: Final = 10
_CALM_SHARE: Final = 0.2
"""Lines of the batch that nobody disturbs, as a share of those of the killed one."""
_START_S: Final = 2.5
"""Seconds after a start within which the process may be killed again: it has read what there was
and continues by then."""


@dataclass(slots=True)
class Memory:
    """Resident memory of the orchestrator in MiB, with the number of lines done then."""

    looks: list[tuple[int, float]] = field(default_factory=list)

    def by_tenths(self, lines: int) -> list[float]:
        """Most memory in each tenth of ``lines``; 0 for one without a look."""
        tenths = [[0.0] for _ in range(_PARTS)]
        for done, mib in self.looks:
            tenths[min(_PARTS - 1, _PARTS * done // lines)].append(mib)
        return [round(max(tenth), 1) for tenth in tenths]

    def growth(self, lines: int) -> float:
        """Growth from the second tenth to the last, as a share."""
        _, second, *_, last = self.by_tenths(lines)
        return last / second - 1 if second else 0.0


@dataclass(slots=True)
class BatchFindings:
    """Findings of a run."""

    lines: int
    """Lines of the batch under kills."""
    kills: Counter[str] = field(default_factory=Counter)
    """Number of kills, by what the orchestrator was doing."""
    killed_s: float = 0.0
    calm_s: float = 0.0
    killed: Memory = field(default_factory=Memory)
    calm: Memory = field(default_factory=Memory)
    sent: list[Sent] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def calm_lines(self) -> int:
        """Lines of the batch that nobody disturbs."""
        return round(_CALM_SHARE * self.lines)

    def close(self) -> None:
        """Gather the faults of all batches, and judge memory."""
        self.faults += [fault for sent in self.sent for fault in sent.faults]
        if (growth := self.calm.growth(self.calm_lines)) > MAX_GROWTH:
            self.faults.append(f"the orchestrator's memory grew by {100 * growth:.1f} %")


class Killer:
    """Kills an orchestrator and starts it again."""

    def __init__(self, process: OrchestratorProcess, found: BatchFindings) -> None:
        self._process = process
        self._found = found

    async def strike(self, moment: str, again_s: Sequence[float] = ()) -> None:
        """Kill the orchestrator, and once more that many seconds after each start."""
        self._kill(moment)
        for seconds in again_s:
            await self._start_and_kill(seconds)
        await self._process.stop(0.0)
        # A crowded machine may take longer to start it; where it has died the wait below says so.
        with suppress(StartFailed):
            await self._process.start()
        await self._process.wait_ready(READY_S)

    async def _start_and_kill(self, seconds: float) -> None:
        await self._process.stop(0.0)
        starting = asyncio.create_task(self._process.start())
        await asyncio.sleep(seconds)
        while self._process.pid is None and not starting.done():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        self._kill("starting or going on")
        with suppress(StartFailed):
            await starting

    def _kill(self, moment: str) -> None:
        os.kill(alive(self._process.pid), signal.SIGKILL)
        self._found.kills[moment] += 1


class BatchRun:
    """Batches sent to one orchestrator."""

    def __init__(
        self,
        process: OrchestratorProcess,
        http: aiohttp.ClientSession,
        found: BatchFindings,
        rng: random.Random,
    ) -> None:
        self._process = process
        self._client = BatchClient(http, process.url)
        self._found = found
        self._rng = rng
        self._killer = Killer(process, found)

    async def play(self, kills: int) -> None:
        """Have a batch served under ``kills``, then one without any."""
        found, begun = self._found, time.monotonic()
        await self._under_kills(kills)
        found.killed_s = time.monotonic() - begun
        begun = time.monotonic()
        calm = await self._send(BatchOrder("calm", found.calm_lines, KEY))
        await self._until_over(calm, found.calm)
        found.calm_s = time.monotonic() - begun
        await self._read_twice()
        found.close()

    async def _under_kills(self, kills: int) -> None:
        rng, killer = self._rng, self._killer
        sent = await self._send(BatchOrder("killed", self._found.lines, KEY))
        first, last = -(-kills // 20), -(-kills // 10)
        due = list(strikes(rng, kills - first - last, sent.order.lines))
        if first:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            await killer.strike("checking", again(rng, first - 1))
        for at, again_s in due:
            await self._until_over(sent, self._found.killed, at)
            await asyncio.sleep(rng.uniform(0.0, _LOOK_EVERY_S))
            await killer.strike("serving", again_s)
        if last:
            await self._until_over(sent, self._found.killed, sent.order.lines - 1)
            await killer.strike("closing its files", again(rng, last - 1))
        await self._until_over(sent, self._found.killed)

    async def _send(self, order: BatchOrder) -> Sent:
        sent = await self._client.send(order)
        self._found.sent.append(sent)
        return sent

    async def _until_over(
        self, sent: Sent, memory: Memory | None = None, lines: int | None = None
    ) -> None:
        """Wait until a batch is over, or has ``lines`` done."""
        while not sent.is_over and (lines is None or sent.done < lines):
            await self._client.look(sent)
            if memory is not None:
                usage = await asyncio.to_thread(ServerUsage.of_each, [alive(self._process.pid)])
                memory.looks.append((sent.done, usage.rss_mib))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _read_twice(self) -> None:
        """Judge all batches, and whether one more kill changes anything that is told of them."""
        before = [await self._client.read(sent) for sent in self._found.sent]
        await self._killer.strike("all over")
        for sent, digest in zip(self._found.sent, before, strict=True):
            await self._client.look(sent)
            if await self._client.read(sent) != digest:
                self._found.faults.append(f"{sent.order.name}: a kill has changed its results")


def again(rng: random.Random, count: int) -> list[float]:
    """Seconds after ``count`` starts in a row at which the process is killed again."""
    return [rng.uniform(0.0, _START_S) for _ in range(count)]


def strikes(rng: random.Random, kills: int, lines: int) -> Iterator[tuple[int, list[float]]]:
    """Numbers of lines at whose end to strike, in order, each with the seconds after the starts
    that follow at which to kill again: ``kills`` in all."""
    found = []
    while kills > 0:
        more = again(rng, min(kills - 1, rng.choice((0, 0, 1, 2))))
        found.append((rng.randrange(lines), more))
        kills -= 1 + len(more)
    yield from sorted(found)


def keys() -> str:
    """``TIDEGATE_KEYS`` for the clients of a run."""
    return json.dumps({KEY: {"token": KEY}})


def facts_of(found: BatchFindings) -> dict[str, Any]:
    """The findings as a bundle has them."""
    entries: Counter[str] = sum((sent.entries for sent in found.sent), Counter())
    return {
        "lines": found.lines,
        "calm_lines": found.calm_lines,
        "kills": found.kills.total(),
        "kills_by_moment": dict(found.kills),
        "batches": len(found.sent),
        "entries": dict(entries),
        "missing": sum(sent.missing for sent in found.sent),
        "doubled": sum(sent.doubled for sent in found.sent),
        "seconds": round(found.killed_s, 1),
        "lines_per_s": round(found.calm_lines / found.calm_s, 1),
        "killed_memory_mib": found.killed.by_tenths(found.lines),
        "calm_memory_mib": found.calm.by_tenths(found.calm_lines),
        "calm_growth_percent": round(100 * found.calm.growth(found.calm_lines), 2),
        "faults": found.faults,
    }


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    recording = begin(parser, args, "perf.chaos.batches", *sys.argv[1:])
    found, console = BatchFindings(args.lines), new_console()
    async with (
        tritons(StackSpec("synthetic-free"), 1) as (triton,),
        orchestrating([[triton.grpc_address]], {"TIDEGATE_KEYS": keys()}) as ((process,), _),
        aiohttp.ClientSession() as http,
    ):
        run = BatchRun(process, http, found, random.Random(args.seed))
        await run.play(args.kills)
    facts = facts_of(found)
    for what, value in facts.items():
        console.print(f"{what}: {value}", markup=False)
    recording.save(recording.facts() | facts)
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
