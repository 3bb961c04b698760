"""Runs a load generator in its own process, and returns its results."""

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from perf.load import open_loop
from perf.load.closed_loop import ClosedLoopPlan, LoadFailed, LoadResult
from perf.load.connection import EVENT, FIRST_TEXT, HOST, HttpConnection

_MARGIN_S = 45.0
"""Seconds for the generator's start and for the streams that still run at the end."""


PATH = "/v1/completions"
CLIENTS = 32
MAX_TOKENS = 1024
POLL_MS = 4.0
_FEW_TOKENS = 5


@dataclass(frozen=True, slots=True)
class FloodTarget:
    """A server to flood, and its processes whose CPU time is measured."""

    port: int
    watch: dict[str, int]
    model: str = "demo"


class MeasuredWindows(NamedTuple):
    """Consecutive measured windows: ``number`` windows of ``window_s``, after ``warm_s``."""

    warm_s: float
    window_s: float
    number: int

    def tokens(self, step_ms: float) -> int:
        """Length of a stream with one token per ``step_ms`` that outlasts all windows, so that they
        do not include the cost of a stream's start."""
        return round((self.warm_s + self.number * self.window_s + 1.0) * 1000 / step_ms)


def completion(
    model: str, max_tokens: int, prompt: str | list[int] = "Time and tide"
) -> dict[str, object]:
    """Body of a streamed completion of exactly ``max_tokens`` that reports its usage."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def rates(result: LoadResult) -> list[float]:
    """Tokens per second, window by window."""
    return [window.tokens / window.seconds for window in result.windows]


def us_per_token(result: LoadResult, process: str) -> list[float]:
    """CPU of a watched process in µs per token, window by window."""
    return [window.cpu_s[process] * 1e6 / window.tokens for window in result.windows]


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Ratios window by window, as ``in_turns`` pairs them."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


async def apply(plan: ClosedLoopPlan) -> LoadResult:
    """Generate the load. Raises ``LoadFailed`` when a token was lost or the time is up."""
    budget_s = plan.warm_s + plan.windows * plan.window_s + _MARGIN_S
    return msgspec.json.decode(
        await _generate("perf.load.closed_loop", plan, budget_s), type=LoadResult
    )


async def apply_open_loop(plan: open_loop.OpenLoopPlan) -> list[open_loop.Result]:
    """Offer the requests of an open loop. Raises ``LoadFailed`` when the time is up."""
    last_s = plan.asks[-1].at_s if plan.asks else 0.0
    budget_s = last_s + plan.linger_s + _MARGIN_S
    return msgspec.json.decode(
        await _generate("perf.load.open_loop", plan, budget_s), type=list[open_loop.Result]
    )


async def _generate(
    module: str, plan: ClosedLoopPlan | open_loop.OpenLoopPlan, budget_s: float
) -> bytes:
    """Run ``module`` with ``plan`` as a file; returns what it prints. Raises ``LoadFailed``."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        await asyncio.to_thread(Path(file.name).write_bytes, msgspec.json.encode(plan))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            file.name,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(budget_s):
                output, errors = await process.communicate()
        except TimeoutError as error:
            raise LoadFailed(f"the load generator did not end within {budget_s:.0f} s") from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    if process.returncode != 0:
        raise LoadFailed(errors.decode(errors="replace").strip())
    return output


async def stream(
    port: int,
    body: Mapping[str, object],
    clients: int,
    windows: MeasuredWindows,
    *,
    watch: Mapping[str, int] | None = None,
    poll_ms: float = 0.0,
) -> LoadResult:
    """Load a server with ``clients`` that stream ``body`` again and again; see ``ClosedLoopPlan``.

    Raises ``LoadFailed`` as ``apply`` does.
    """
    warm_s, window_s, number = windows
    return await apply(
        ClosedLoopPlan(
            host=HOST,
            port=port,
            path=PATH,
            body=dict(body),
            clients=clients,
            overhead_events=await overhead_events(port, {**body, "max_tokens": _FEW_TOKENS}),
            warm_s=warm_s,
            window_s=window_s,
            windows=number,
            poll_ms=poll_ms,
            watch=dict(watch or {}),
        )
    )


async def flood(target: FloodTarget, windows: MeasuredWindows) -> LoadResult:
    """Load ``target`` with 32 streaming clients, each reading tokens as fast as they arrive."""
    body = completion(target.model, MAX_TOKENS)
    return await stream(target.port, body, CLIENTS, windows, watch=target.watch, poll_ms=POLL_MS)


async def in_turns(
    first: FloodTarget, second: FloodTarget, *, quick: bool
) -> tuple[LoadResult, LoadResult]:
    """Flood both in short turns, so that other work on the machine affects both equally."""
    rounds, window_s = (3, 0.4) if quick else (5, 1.5)
    results: tuple[list[LoadResult], list[LoadResult]] = ([], [])
    for _ in range(rounds):
        for target, into in zip((first, second), results, strict=True):
            into.append(await flood(target, MeasuredWindows(0.3, window_s, 2)))
    return _joined(results[0]), _joined(results[1])


def _joined(results: list[LoadResult]) -> LoadResult:
    return LoadResult(
        windows=[window for result in results for window in result.windows],
        requests=sum(result.requests for result in results),
        tokens=sum(result.tokens for result in results),
        own_cpu_s=sum(result.own_cpu_s for result in results),
    )


async def overhead_events(port: int, body: dict[str, object]) -> int:
    """Events of a stream that carry no token, counted on one stream by its JSON.

    Raises ``LoadFailed`` when there is not exactly one event per token.
    """
    async with HttpConnection(HOST, port) as connection:
        connection.send("POST", PATH, body)
        response = await connection.finish()
    with_text = len(FIRST_TEXT.findall(response))
    if with_text != body["max_tokens"]:
        raise LoadFailed(f"{body['max_tokens']} tokens came as {with_text} events with text")
    return response.count(EVENT) - with_text
