"""``python -m perf.chaos.batches``: one batch of many lines on the real stack, whose orchestrator
is killed again and again, while somebody else asks for short texts.

Exits with 1 unless every line has exactly one entry. Tells the orchestrator's memory by tenths of
the batch, and how long the other client waited.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from perf.chaos.world import READY_S, alive, orchestrating
from perf.load.usage import Usage
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.stats import median, percentile
from perf.stack.stack import StackSpec, tritons
from pool.units.orchestrator import OrchestratorProcess

_URL: Final = "/v1/completions"
_BODY: Final = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8}
_LOOK_EVERY_S: Final = 0.25
_ASK_EVERY_S: Final = 0.2
_ALONE_S: Final = 5.0
"""Seconds for which the other client first has the service to itself."""
_PARTS: Final = 10
_AWAY: Final = (aiohttp.ClientError, TimeoutError)
"""Errors that a client sees of a service that is down."""


@dataclass(slots=True)
class BatchFindings:
    """Findings of a run. Memory in MiB of resident pages, times in seconds or, where named so,
    ms."""

    lines: int
    kills: int = 0
    seconds: float = 0.0
    memory: list[tuple[int, float]] = field(default_factory=list)
    """Lines done so far, and the orchestrator's memory then."""
    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    status: str = ""
    missing: int = 0
    doubled: int = 0
    strange: int = 0
    """Entries that belong to no line, or are no answer."""

    @property
    def is_right(self) -> bool:
        return self.status == "completed" and not (self.missing + self.doubled + self.strange)

    def memory_by_tenths(self) -> list[float]:
        tenths = [[0.0] for _ in range(_PARTS)]
        for done, mib in self.memory:
            tenths[min(_PARTS - 1, _PARTS * done // self.lines)].append(mib)
        return [round(max(tenth), 1) for tenth in tenths]


class BatchRun:
    """One batch sent to one orchestrator."""

    def __init__(self, process: OrchestratorProcess, http: aiohttp.ClientSession) -> None:
        self._process = process
        self._http = http

    async def play(self, found: BatchFindings, kills: int, rng: random.Random) -> None:
        """Have the batch served; the orchestrator dies at moments that ``rng`` chooses."""
        await self._ask(found.alone_ms, time.monotonic() + _ALONE_S)
        begun = time.monotonic()
        name = await self._create(found.lines)
        asking = asyncio.create_task(self._ask(found.beside_ms, float("inf")))
        due = sorted(rng.randrange(found.lines) for _ in range(kills))
        try:
            while not (batch := await self._look(name, found))["status"].startswith("comp"):
                done = batch["request_counts"]["completed"]
                if due and done >= due[0]:
                    due.pop(0)
                    await asyncio.sleep(rng.uniform(0.0, _LOOK_EVERY_S))
                    await self._kill(rng)
                    found.kills += 1
                elif batch["status"] in ("failed", "expired", "cancelled"):
                    break
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            asking.cancel()
        found.seconds = time.monotonic() - begun
        found.status = batch["status"]
        await self._judge(batch, found)

    async def _create(self, lines: int) -> str:
        form = aiohttp.FormData()
        form.add_field("file", _lines(lines), filename="requests.jsonl")
        form.add_field("purpose", "batch")
        file = await self._json("POST", "/v1/files", data=form)
        body = {"input_file_id": file["id"], "endpoint": _URL, "completion_window": "24h"}
        return str((await self._json("POST", "/v1/batches", json=body))["id"])

    async def _look(self, name: str, found: BatchFindings) -> dict[str, Any]:
        batch = await self._json("GET", f"/v1/batches/{name}")
        usage = await asyncio.to_thread(Usage.of_each, [alive(self._process.pid)])
        found.memory.append((batch["request_counts"]["completed"], usage.rss_mib))
        return batch

    async def _kill(self, rng: random.Random) -> None:
        """Kill the orchestrator and start it again; now and then kill it while it starts, too."""
        for is_last in (False, True) if rng.random() < 0.2 else (True,):
            os.kill(alive(self._process.pid), signal.SIGKILL)
            await self._process.stop(0.0)
            await self._process.start()
            if not is_last:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
        await self._process.wait_ready(READY_S)

    async def _ask(self, waited_ms: list[float], until: float) -> None:
        """Be an interactive client: time one short request after the other, into ``waited_ms``."""
        while time.monotonic() < until:
            begun = time.monotonic()
            with suppress(*_AWAY):
                await self._json("POST", _URL, json=_BODY)
                waited_ms.append(1000 * (time.monotonic() - begun))
            await asyncio.sleep(_ASK_EVERY_S)

    async def _judge(self, batch: dict[str, Any], found: BatchFindings) -> None:
        counts: Counter[str] = Counter()
        for file in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            async with self._http.get(f"{self._process.url}/v1/files/{file}/content") as response:
                async for text in response.content:
                    entry = json.loads(text)
                    counts[entry["custom_id"]] += 1
                    found.strange += (entry["response"] or {}).get("status_code") != 200
        names = {_name(number) for number in range(found.lines)}
        found.missing = len(names - set(counts))
        found.strange += len(set(counts) - names)
        found.doubled = sum(count - 1 for count in counts.values())

    async def _json(self, method: str, path: str, **sent: Any) -> dict[str, Any]:
        async with self._http.request(method, f"{self._process.url}{path}", **sent) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


def _name(number: int) -> str:
    return f"line-{number}"


def _lines(count: int) -> bytes:
    lines = (
        {"custom_id": _name(number), "method": "POST", "url": _URL, "body": _BODY}
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _told(waited_ms: list[float]) -> dict[str, float]:
    if not waited_ms:
        return {}
    p50, p99 = median(waited_ms), percentile(waited_ms, 99)
    return {"requests": len(waited_ms), "p50_ms": round(p50, 1), "p99_ms": round(p99, 1)}


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    recording = begin(parser, args, "perf.chaos.batches", *sys.argv[1:])
    found, console = BatchFindings(args.lines), new_console()
    async with (
        tritons(StackSpec("synthetic-free"), 1) as (triton,),
        orchestrating([[triton.grpc_address]]) as ((process,), _),
        aiohttp.ClientSession() as http,
    ):
        await BatchRun(process, http).play(found, args.kills, random.Random(args.seed))
    facts = {
        "lines": found.lines,
        "orchestrator_kills": found.kills,
        "status": found.status,
        "missing": found.missing,
        "doubled": found.doubled,
        "strange": found.strange,
        "seconds": round(found.seconds, 1),
        "lines_per_s": round(found.lines / found.seconds, 1),
        "memory_mib_by_tenths": found.memory_by_tenths(),
        "others_alone": _told(found.alone_ms),
        "others_beside": _told(found.beside_ms),
    }
    for what, value in facts.items():
        console.print(f"{what}: {value}")
    recording.save(recording.facts() | {"seed": args.seed} | facts)
    return int(not found.is_right)


if __name__ == "__main__":
    sys.exit(status_of(_main()))
