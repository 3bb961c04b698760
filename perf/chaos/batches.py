"""``python -m perf.chaos.batches``: one batch of many lines on the real stack. The run repeatedly
kills the orchestrator: while it checks the lines, serves them, starts, and closes the batch's files
(OR-20). Then one process serves a batch with a fifth as many lines; its memory must not grow.

Exits with 1 unless every line of every batch has exactly one entry, of the right kind and in the
right file, the counts of a batch match its files, and both survive one more kill.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from catalog.errors import StartFailed
from perf.chaos.world import orchestrating
from perf.load.usage import PARTS, rss_mib
from perf.report.command import begin, new_console, new_parser, status_of
from perf.stack.stack import READY_S, StackSpec, alive, tritons
from pool.units.orchestrator import OrchestratorProcess

MAX_GROWTH: Final = 0.05
"""Largest growth of resident memory, as a share, from the second tenth of the lines to the last
that one process serves."""
_KEY: Final = "many"
_URL: Final = "/v1/completions"
_BODY: Final = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
_REFUSED: Final = {**_BODY, "max_tokens": -1}
_RETRY_S: Final = 0.1
_LOOK_EVERY_S: Final = 0.25
_CALM_SHARE: Final = 0.2
"""Lines of the undisturbed batch, as a share of those of the batch under kills."""
_START_S: Final = 2.5
"""Seconds after a start in which the process may be killed again. By then it has read its state and
continues."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A batch to send."""

    name: str
    lines: int
    refused_every: int = 50
    """Each line whose number is a multiple of this is one that the service always refuses."""

    def ids(self) -> dict[str, str]:
        """Custom ids of all lines, with the kind of entry that each must have once served."""
        numbers = range(1, self.lines + 1)
        kinds = ("errored" if n % self.refused_every == 0 else "succeeded" for n in numbers)
        return dict(zip((f"{self.name}-{n}" for n in numbers), kinds, strict=True))

    def content(self) -> bytes:
        """The file of all lines."""
        lines = bytearray()
        for custom_id, kind in self.ids().items():
            body = _REFUSED if kind == "errored" else _BODY
            line = {"custom_id": custom_id, "method": "POST", "url": _URL, "body": body}
            lines += json.dumps(line).encode() + b"\n"
        return bytes(lines)


@dataclass(slots=True)
class Sent:
    """An order that was sent, and its outcome."""

    order: BatchOrder
    id: str
    input_id: str
    state: dict[str, Any] = field(default_factory=dict)
    """The latest batch object from the service."""
    entries: Counter[str] = field(default_factory=Counter)
    """Number of entries by kind: succeeded, errored."""
    missing: int = 0
    doubled: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Number of lines that had an entry at the last poll."""
        counts = self.state.get("request_counts", {})
        return sum(n for kind, n in counts.items() if kind not in ("total", "processing"))

    @property
    def is_over(self) -> bool:
        return self.state.get("status") in ("completed", "failed", "expired", "cancelled")

    def judge(self, entries: Iterator[tuple[str, str]]) -> None:
        """Check the ``entries`` (custom id and kind) against the order and the reported counts."""
        kinds, seen = self.order.ids(), Counter[str]()
        for custom_id, kind in entries:
            seen[custom_id] += 1
            self.entries[kind] += 1
            if kind != kinds.get(custom_id):
                self._fault(f"the line {custom_id!r} is {kind}, not {kinds.get(custom_id)}")
        self.missing = len(kinds.keys() - seen.keys())
        self.doubled = sum(count - 1 for count in seen.values())
        for what in ("missing", "doubled"):
            if count := getattr(self, what):
                self._fault(f"{count} lines are {what}")
        succeeded = self.entries["succeeded"]
        failed = self.entries.total() - succeeded
        counted = {"total": self.order.lines, "completed": succeeded, "failed": failed}
        if (told := self.state["request_counts"]) != counted:
            self._fault(f"its counts are {told}, and its entries {counted}")
        if self.state["status"] != "completed":
            self._fault(f"it ended as {self.state['status']}: {self.state.get('errors')}")

    def _fault(self, what: str) -> None:
        self.faults.append(f"{self.order.name}: {what}")


class BatchClient:
    """A client that retries while the service is down."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def send(self, order: BatchOrder) -> Sent:
        """Create the batch. If the service dies during the call, it may exist twice, with two
        ids."""
        content = order.content()

        def form() -> aiohttp.FormData:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", content, filename="requests.jsonl")
            return form

        file = await self._ask("POST", "/v1/files", form=form)
        body = {"input_file_id": file["id"], "endpoint": _URL, "completion_window": "24h"}
        told = await self._ask("POST", "/v1/batches", json=body)
        return Sent(order, told["id"], file["id"], told)

    async def look(self, sent: Sent) -> None:
        """Poll the state of the batch."""
        sent.state = await self._ask("GET", f"/v1/batches/{sent.id}")

    async def read(self, sent: Sent) -> str:
        """Check the entries of a finished batch; return a digest of its state and its files."""
        sent.entries.clear()
        digest = hashlib.sha256(json.dumps(sent.state, sort_keys=True).encode())
        found = []
        for is_output, what in ((True, "output_file_id"), (False, "error_file_id")):
            if not sent.state[what]:
                continue
            async with self._http.get(f"/v1/files/{sent.state[what]}/content") as response:
                response.raise_for_status()
                async for text in response.content:
                    digest.update(text)
                    entry = json.loads(text)
                    kind = _kind(entry)
                    if is_output != (kind == "succeeded"):
                        kind = f"{kind} in the other file"
                    found.append((entry["custom_id"], kind))
        if sent.state["input_file_id"] != sent.input_id:
            sent.faults.append(f"{sent.order.name}: it has another input file now")
        sent.judge(iter(found))
        return digest.hexdigest()

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        form: Callable[[], aiohttp.FormData] | None = None,
    ) -> dict[str, Any]:
        """Retry a request until it succeeds, also when the service has no room or no disk space.
        Raises ``ClientResponseError`` for a permanent error."""
        while True:
            sent = {"data": form()} if form else {"json": json}
            try:
                async with self._http.request(method, path, **sent) as response:
                    response.raise_for_status()
                    answer: dict[str, Any] = await response.json()
                    return answer
            except aiohttp.ClientResponseError as error:
                if error.status != 503:
                    raise
            except (aiohttp.ClientError, TimeoutError):  # the service is down
                pass
            await asyncio.sleep(_RETRY_S)


def _kind(entry: dict[str, Any]) -> str:
    if entry["response"] is None:
        return str(entry["error"])
    status = entry["response"]["status_code"]
    return {200: "succeeded", 400: "errored"}.get(status, str(status))


@dataclass(slots=True)
class BatchFindings:
    """Findings of a run."""

    lines: int
    """Lines of the batch under kills."""
    kills: Counter[str] = field(default_factory=Counter)
    """Number of kills, by what the orchestrator was doing."""
    killed_s: float = 0.0
    calm_s: float = 0.0
    looks: list[tuple[int, float]] = field(default_factory=list)
    """Lines of the undisturbed batch that were done, and the orchestrator's MiB then."""
    sent: list[Sent] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def calm_lines(self) -> int:
        """Lines of the undisturbed batch."""
        return round(_CALM_SHARE * self.lines)

    def memory_mib(self) -> list[float]:
        """Maximum memory in each tenth of the undisturbed lines; 0 for a tenth without samples."""
        tenths = [[0.0] for _ in range(PARTS)]
        for done, mib in self.looks:
            tenths[min(PARTS - 1, PARTS * done // self.calm_lines)].append(mib)
        return [round(max(tenth), 1) for tenth in tenths]

    def growth(self) -> float:
        """Growth of memory from the second tenth to the last, as a share."""
        _, second, *_, last = self.memory_mib()
        return last / second - 1 if second else 0.0

    def close(self) -> None:
        """Collect the faults of all batches, and check memory."""
        self.faults += [fault for sent in self.sent for fault in sent.faults]
        if (growth := self.growth()) > MAX_GROWTH:
            self.faults.append(f"the orchestrator's memory grew by {100 * growth:.1f} %")

    def facts(self) -> dict[str, Any]:
        """The findings in the format of a bundle."""
        entries: Counter[str] = sum((sent.entries for sent in self.sent), Counter())
        return {
            "lines": self.lines,
            "calm_lines": self.calm_lines,
            "kills": self.kills.total(),
            "kills_by_moment": dict(self.kills),
            "batches": len(self.sent),
            "entries": dict(entries),
            "missing": sum(sent.missing for sent in self.sent),
            "doubled": sum(sent.doubled for sent in self.sent),
            "seconds": round(self.killed_s, 1),
            "lines_per_s": round(self.calm_lines / self.calm_s, 1),
            "calm_memory_mib": self.memory_mib(),
            "calm_growth_percent": round(100 * self.growth(), 2),
            "faults": self.faults,
        }


class BatchRun:
    """Batches sent to one orchestrator, which is killed during the run."""

    def __init__(
        self,
        process: OrchestratorProcess,
        http: aiohttp.ClientSession,
        found: BatchFindings,
        rng: random.Random,
    ) -> None:
        self._process = process
        self._client = BatchClient(http)
        self._found = found
        self._rng = rng

    async def play(self, kills: int) -> None:
        """Run a batch under ``kills``, then one without kills."""
        found, begun = self._found, time.monotonic()
        await self._under_kills(kills)
        found.killed_s = time.monotonic() - begun
        begun = time.monotonic()
        calm = await self._send(BatchOrder("calm", found.calm_lines))
        while not calm.is_over:
            await self._look(calm)
            found.looks.append((calm.done, rss_mib(alive(self._process.pid))))
        found.calm_s = time.monotonic() - begun
        await self._read_twice()
        found.close()

    async def _under_kills(self, kills: int) -> None:
        rng = self._rng
        sent = await self._send(BatchOrder("killed", self._found.lines))
        first, last = -(-kills // 20), -(-kills // 10)
        due = list(strikes(rng, kills - first - last, sent.order.lines))
        if first:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            await self._strike("checking", again(rng, first - 1))
        for at, again_s in due:
            await self._until(sent, at)
            await asyncio.sleep(rng.uniform(0.0, _LOOK_EVERY_S))
            await self._strike("serving", again_s)
        if last:
            await self._until(sent, sent.order.lines - 1)
            await self._strike("closing its files", again(rng, last - 1))
        await self._until(sent, sent.order.lines + 1)

    async def _send(self, order: BatchOrder) -> Sent:
        sent = await self._client.send(order)
        self._found.sent.append(sent)
        return sent

    async def _until(self, sent: Sent, lines: int) -> None:
        """Wait until a batch has ``lines`` done, or is over."""
        while not sent.is_over and sent.done < lines:
            await self._look(sent)

    async def _look(self, sent: Sent) -> None:
        await self._client.look(sent)
        await asyncio.sleep(_LOOK_EVERY_S)

    async def _read_twice(self) -> None:
        """Check all batches, and that one more kill does not change their state."""
        before = [await self._client.read(sent) for sent in self._found.sent]
        await self._strike("all over")
        for sent, digest in zip(self._found.sent, before, strict=True):
            await self._client.look(sent)
            if await self._client.read(sent) != digest:
                self._found.faults.append(f"{sent.order.name}: a kill has changed its results")

    async def _strike(self, moment: str, again_s: Sequence[float] = ()) -> None:
        """Kill the orchestrator, and once more that many seconds after each start."""
        process = self._process
        self._kill(moment)
        for seconds in again_s:
            await process.stop(0.0)
            starting = asyncio.create_task(process.start())
            await asyncio.sleep(seconds)
            while process.pid is None and not starting.done():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            self._kill("starting or going on")
            with suppress(StartFailed):
                await starting
        await process.stop(0.0)
        # A busy machine may take longer to start it. If it has died, the wait below reports that.
        with suppress(StartFailed):
            await process.start()
        await process.wait_ready(READY_S)

    def _kill(self, moment: str) -> None:
        os.kill(alive(self._process.pid), signal.SIGKILL)
        self._found.kills[moment] += 1


def again(rng: random.Random, count: int) -> list[float]:
    """Seconds after ``count`` starts in a row at which the process is killed again."""
    return [rng.uniform(0.0, _START_S) for _ in range(count)]


def strikes(rng: random.Random, kills: int, lines: int) -> Iterator[tuple[int, list[float]]]:
    """Line counts at which to kill, in order. Each has the delays in seconds of more kills after
    the following starts; ``kills`` in total."""
    found = []
    while kills > 0:
        more = again(rng, min(kills - 1, rng.choice((0, 0, 1, 2))))
        found.append((rng.randrange(lines), more))
        kills -= 1 + len(more)
    yield from sorted(found)


async def run(addresses: Sequence[str], found: BatchFindings, seed: int, kills: int) -> None:
    """Serve the batches with a new orchestrator in front of the workers at ``addresses``."""
    keys = {"TIDEGATE_KEYS": json.dumps({_KEY: {"token": _KEY}})}
    async with orchestrating([addresses], keys) as ((process,), _):
        authorized = {"Authorization": f"Bearer {_KEY}"}
        async with aiohttp.ClientSession(process.url, headers=authorized) as http:
            await BatchRun(process, http, found, random.Random(seed)).play(kills)


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    recording = begin(parser, args, "perf.chaos.batches", *sys.argv[1:])
    found, console = BatchFindings(args.lines), new_console()
    async with tritons(StackSpec("synthetic-free"), 1) as (triton,):
        await run([triton.grpc_address], found, args.seed, args.kills)
    facts = found.facts()
    for what, value in facts.items():
        console.print(f"{what}: {value}", markup=False)
    recording.save(recording.facts() | facts)
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
