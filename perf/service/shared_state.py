"""Cost of a state that several orchestrators share, and how soon one takes over from another.

Submissions of a few tokens over HTTP, 200 a second, or fewer where the machine does not carry that,
in turns: to an orchestrator that is alone, to one that shares a state, where a limit costs the one
round trip on a request's path, and durable ones, which are in the store before their 202. The store
is a Redis on the same machine that has each write on the disk before it answers.

Then an orchestrator is killed while a durable task runs there, whose client follows it at another:
from the kill to the next token. Most of that is the dead one's lease, five seconds by default.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from perf.report.bundle import Figure
from perf.report.command import Skip
from perf.report.stats import median, percentile
from perf.service import submissions
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec, orchestrating, tritons
from perf.stack.store import store_program, store_server
from pool.units.orchestrator import OrchestratorProcess

_NO_LIMIT = "1000000000"
_READY_S = 30.0
_RUNS_FOR_TOKENS = 1500
_PAUSE_S = 0.02


@dataclass(slots=True)
class _Times:
    """Percentiles of each round, in ms."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    one_by_one: list[float] = field(default_factory=list)
    """Medians of submissions that were made one at a time, before each round."""

    @property
    def is_carried(self) -> bool:
        """Whether little of a submission's time is a wait for others."""
        return submissions.is_carried(self.p50, self.one_by_one)

    def add(self, taken: list[float]) -> None:
        self.p50.append(median(taken))
        self.p99.append(percentile(taken, 99))

    def beyond(self, other: "_Times") -> "_Times":
        """How much longer these are, round by round."""
        return _Times(
            [a - b for a, b in zip(self.p50, other.p50, strict=True)],
            [a - b for a, b in zip(self.p99, other.p99, strict=True)],
        )


@dataclass(slots=True)
class _Latencies:
    per_s: float
    alone: _Times = field(default_factory=_Times)
    limited: _Times = field(default_factory=_Times)
    durable: _Times = field(default_factory=_Times)

    @property
    def is_carried(self) -> bool:
        return all(times.is_carried for times in (self.alone, self.limited, self.durable))


async def run(context: Context) -> list[Figure]:
    program = store_program()
    if program is None:
        raise Skip("needs redis-server or valkey-server: apt-get install redis-server")
    rounds, seconds, kills = (2, 1.5, 1) if context.quick else (5, 4.0, 5)
    spec = StackSpec("synthetic-paced", device=context.device, step_ms=5.0, max_running=256)
    with tempfile.TemporaryDirectory(prefix="tidegate-state-") as folder:
        async with store_server(program, Path(folder)) as store, tritons(spec, 1) as (triton,):
            at = [triton.grpc_address]
            env = {
                "TIDEGATE_JOURNAL__PATH": "",
                "TIDEGATE_QUEUE__MAX_WAITING": "5000",
                "TIDEGATE_LIMITS__EACH_KEY__REQUESTS_PER_MIN": _NO_LIMIT,
                "TIDEGATE_LIMITS__EACH_KEY__TOKENS_PER_MIN": _NO_LIMIT,
            }
            shared = env | {"TIDEGATE_STATE__URL": store.url}
            async with (
                orchestrating(at, env, "state-alone") as alone,
                orchestrating(at, shared, "state-first") as first,
                orchestrating(at, shared, "state-second") as second,
            ):
                found = await _latencies(alone, first, rounds, seconds)
                takeovers = [await _takeover(first, second) for _ in range(kills)]
    return _figures(found, takeovers)


def _figures(found: _Latencies, takeovers: list[float]) -> list[Figure]:
    of, turns = Figure.of, f"in turns at {found.per_s:g}/s"
    if not found.is_carried:
        turns += ", too many for this machine now"
    limited, durable = found.limited.beyond(found.alone), found.durable.beyond(found.alone)
    return [
        of("state.per_s", "submissions, all of the below", "/s", [found.per_s], better="neither"),
        of("state.alone_p50_ms", f"202 without a store, {turns}, p50", "ms", found.alone.p50),
        of("state.alone_p99_ms", "the same, p99", "ms", found.alone.p99),
        of("state.limited_p50_ms", "added by a limit that is shared, p50", "ms", limited.p50),
        of("state.limited_p99_ms", "the same, p99", "ms", limited.p99),
        of("state.durable_p50_ms", "added by a durable task in the store, p50", "ms", durable.p50),
        of("state.durable_p99_ms", "the same, p99", "ms", durable.p99),
        of("state.takeover_s", "from kill -9 to the next token at another", "s", takeovers),
    ]


async def _latencies(
    alone: OrchestratorProcess, shared: OrchestratorProcess, rounds: int, seconds: float
) -> _Latencies:
    """Times to a 202 at the largest rate that the machine carried, durable ones included."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def measure(per_s: float) -> _Latencies:
            found = _Latencies(per_s)
            await _round(http, found, alone, shared, seconds)  # warms up, and tells
            return found

        found = _Latencies((await submissions.at_largest_rate(measure)).per_s)
        for _ in range(rounds):
            await _round(http, found, alone, shared, seconds)
        return found


async def _round(
    http: aiohttp.ClientSession,
    found: _Latencies,
    alone: OrchestratorProcess,
    shared: OrchestratorProcess,
    seconds: float,
) -> None:
    kinds = (
        (found.alone, alone, False),
        (found.limited, shared, False),
        (found.durable, shared, True),
    )
    for times, at, is_durable in kinds:

        def submit(
            number: int, url: str = at.url, is_durable: bool = is_durable
        ) -> Awaitable[float]:
            return submissions.submit(http, url, is_durable=is_durable)

        single = [await submit(0) for _ in range(submissions.ALONE)]
        times.one_by_one.append(median(single))
        times.add(await submissions.at_rate(found.per_s, seconds, submit))


async def _takeover(dying: OrchestratorProcess, other: OrchestratorProcess) -> float:
    """Seconds from an orchestrator's death until the next token of its task comes from another; it
    is started again afterwards."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        body = {"prompt": "Once upon a time", "ignore_eos": True, "durable": True}
        submitted = body | {"max_tokens": _RUNS_FOR_TOKENS}
        async with http.post(f"{dying.url}/v2/tasks", json=submitted) as response:
            task_id = str((await response.json())["task_id"])
        last = await _follow(http, other, task_id, -1, tokens=100)
        died = time.perf_counter()
        dying.kill()
        await dying.stop(0.0)
        now = last
        while now == last:
            now = await _follow(http, other, task_id, last, tokens=1)
            await asyncio.sleep(_PAUSE_S if now == last else 0.0)
        taken_s = time.perf_counter() - died
        async with http.post(f"{other.url}/v2/tasks/{task_id}/cancel"):
            pass
    if now != last + 1:
        raise RuntimeError(f"event {now} came behind {last}")
    await dying.start()
    await dying.wait_ready(_READY_S)
    return taken_s


async def _follow(
    http: aiohttp.ClientSession, at: OrchestratorProcess, task_id: str, last: int, *, tokens: int
) -> int:
    """Read a task's events after ``last`` until so many tokens have come; returns the number of the
    last one, or ``last`` where the stream broke off before any."""
    headers: Mapping[str, str] = {"Last-Event-ID": str(last)} if last >= 0 else {}
    name, number = "", last
    try:
        async with http.get(f"{at.url}/v2/tasks/{task_id}/events", headers=headers) as response:
            async for raw in response.content:
                key, _, value = raw.decode().rstrip("\n").partition(": ")
                if key == "event":
                    name = value
                elif key == "id":
                    number = int(value)
                elif key == "data" and name == "token":
                    tokens -= 1
                    if tokens <= 0:
                        return number
                elif key == "data" and name in ("end", "error"):
                    raise RuntimeError(f"the task ended: {json.loads(value)}")
    except aiohttp.ClientError:
        pass
    return number


BENCH = Bench(
    "state",
    "orchestrators that share a state: the store's part of a submission, a takeover",
    run,
    240,
    in_quick=False,
)
