"""CPU to relay a token, beside vllm-router: engines whose tokens are free behind both.

Ours stands in front of Triton with the synthetic engine, vllm-router in front of
``perf.peers.mock``; either engine goes in steps that give each stream one token. Floods of 1 and 32
clients have steps as fast as either engine makes them, which the mock does far faster than a
Triton: what the router then reads at once are many tokens. Paced, both have the same steps. Ours
and theirs take turns.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from perf.load.closed_loop import LoadResult
from perf.load.drive import POLL_MS, Windows, completion, rates, ratios, stream, us_per_token
from perf.peers.installs import ROUTER
from perf.peers.servers import MODEL, router
from perf.report.bundle import Figure
from perf.stack.stack import StackSpec, running

_FLOODS: Final = (1, 32)
_FLOOD_TOKENS: Final = 1024
_FLOOD_STEP_MS: Final = 0.01
"""Step that is shorter than either engine takes."""
_PACED: Final = ((1, 5.0), (64, 20.0))
"""Clients, and ms of a step."""
_MAX_RUNNING: Final = 64


@dataclass(frozen=True, slots=True)
class RelayLoad:
    """``rounds`` turns of either, of ``windows`` windows each."""

    window_s: float
    windows: int
    rounds: int


@dataclass(frozen=True, slots=True)
class _Side:
    """``front`` is the process between clients and engine; ``watch`` has it and all behind it."""

    key: str
    label: str
    front: str
    port: int
    watch: dict[str, int]


async def measure(load: RelayLoad, *, install: bool) -> list[Figure]:
    """Rates, CPU per token and their ratios. Raises ``Skip`` without vllm-router."""
    await ROUTER.install(allowed=install)
    async with AsyncExitStack() as servers:
        sides = await _sides(servers, _FLOOD_STEP_MS, 0.0)
        figures = []
        for clients in _FLOODS:
            figures += await _compare(sides, clients, load)
    for clients, step_ms in _PACED:
        async with AsyncExitStack() as servers:
            sides = await _sides(servers, step_ms, step_ms)
            figures += await _compare(sides, clients, load, step_ms)
    return figures


async def _sides(servers: AsyncExitStack, ours_ms: float, mock_ms: float) -> tuple[_Side, _Side]:
    theirs = await servers.enter_async_context(router(mock_ms))
    spec = StackSpec("synthetic-paced", step_ms=ours_ms, max_running=_MAX_RUNNING)
    ours = await servers.enter_async_context(running(spec))
    return (
        _Side("tidegate", "Tidegate", "orchestrator", ours.port, ours.pids()),
        _Side("router", ROUTER.label, "router", theirs.port, theirs.watch),
    )


async def _compare(
    sides: tuple[_Side, _Side], clients: int, load: RelayLoad, step_ms: float | None = None
) -> list[Figure]:
    """Figures of ``clients``: of a flood, or paced by steps of ``step_ms``."""
    results: dict[str, list[LoadResult]] = {side.key: [] for side in sides}
    for _ in range(load.rounds):
        for side in sides:
            results[side.key].append(await _turn(side, clients, load, step_ms))
    key, plural = f"{clients}", "s" * (clients > 1)
    what = f"{clients} client{plural}"
    if step_ms is not None:
        key, what = f"{clients}_paced", f"{clients} paced stream{plural}"
    figures = []
    for side in sides:
        prefix, label, turns = f"relay.{side.key}.{key}", f"{side.label}, {what}", results[side.key]
        if step_ms is None:
            rate = _joined([rates(turn) for turn in turns])
            figures.append(
                Figure.of(
                    f"{prefix}.tokens_per_s", f"{label}: relayed", "tokens/s", rate, better="higher"
                )
            )
        cpu = _front(side, turns)
        figures.append(Figure.of(f"{prefix}.cpu_us_per_token", f"{label}: CPU", "µs/token", cpu))
    ours, theirs = (_front(side, results[side.key]) for side in sides)
    label = f"{sides[0].label} ÷ {sides[1].label}, {what}: CPU"
    figures.append(Figure.of(f"relay.ratio.{key}.cpu", label, "", ratios(ours, theirs)))
    return figures


async def _turn(side: _Side, clients: int, load: RelayLoad, step_ms: float | None) -> LoadResult:
    windows = Windows(0.5, load.window_s, load.windows)
    tokens = _FLOOD_TOKENS if step_ms is None else windows.tokens(step_ms)
    return await stream(
        side.port,
        completion(MODEL, tokens),
        clients,
        windows,
        watch=side.watch,
        poll_ms=POLL_MS if step_ms is None else 0.0,
        reframed=True,
    )


def _front(side: _Side, turns: Sequence[LoadResult]) -> list[float]:
    return _joined([us_per_token(turn, side.front) for turn in turns])


def _joined(lists: Sequence[list[float]]) -> list[float]:
    return [value for values in lists for value in values]
