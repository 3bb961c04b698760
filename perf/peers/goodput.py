"""Requests met in time, beside vLLM: the same arrivals to either in turns, at each offered rate.

Every client hangs up when its patience is over. Tidegate is told each deadline; vLLM has nothing
that could be told, so it learns of one when the connection closes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from perf.load.chats import PATH, PATIENCE_S, stories
from perf.load.outcomes import Cell, OfferedTurn
from perf.peers.servers import MODEL, Served
from perf.report.bundle import Figure

_WARM_PER_S = 12.0
_LINGER_S = max(PATIENCE_S) + 0.25


class GoodputLoad(NamedTuple):
    """``rates`` are offered requests per second; ``rounds`` turns of either server at each, in
    which requests count that come within ``window_s`` after ``warm_s``."""

    rates: tuple[float, ...]
    warm_s: float
    window_s: float
    rounds: int


async def measure(
    servers: Sequence[Served], load: GoodputLoad, seed: int, console: Console
) -> list[Cell]:
    """Run all rates in turns; returns a cell per rate and server."""
    for server in servers:
        # The forecasts learn the pace from these, and whatever compiles on first use does so.
        asks = stories(_WARM_PER_S, 2 * load.warm_s, seed - 1, MODEL)
        await server.offer(PATH, asks, _LINGER_S, hang_up=True)
    cells = []
    for rate in load.rates:
        turns: dict[str, list[OfferedTurn]] = {server.name: [] for server in servers}
        idle_s: dict[str, list[float]] = {server.name: [] for server in servers}
        for number in range(load.rounds):
            for server in servers:
                turn, idle = await _turn(server, servers, load, rate, seed + number)
                console.print(f"{rate:g}/s {server.label}: {turn.line()}", style="dim")
                turns[server.name].append(turn)
                idle_s[server.name].append(idle)
        cells += [
            cell_of(server, rate, turns[server.name], idle_s[server.name]) for server in servers
        ]
    return cells


def cell_of(server: Served, rate: float, turns: Sequence[OfferedTurn], idle_s: list[float]) -> Cell:
    """Cell of a server at one offered rate. ``idle_s`` is the CPU time of the other server in each
    turn, in seconds."""
    key, load = f"goodput.{server.name}.{rate:g}", f"{rate:g}/s"
    label = f"{load}, {server.label}: CPU of the other server meanwhile"
    idle = Figure.of(f"{key}.idle_cpu_s", label, "s", idle_s, better="neither")
    return Cell(key, load, server.label, turns, list(map(_kind, PATIENCE_S)), more=[idle])


def _kind(patience_s: float) -> str:
    return f"{patience_s:g}s"


async def _turn(
    server: Served, servers: Sequence[Served], load: GoodputLoad, rate: float, seed: int
) -> tuple[OfferedTurn, float]:
    """A server's turn, and the seconds of CPU that the others took meanwhile."""
    asks = stories(rate, load.warm_s + load.window_s, seed, MODEL)
    idle = [other for other in servers if other is not server]
    before = [other.cpu_s() for other in idle]
    results = await server.offer(PATH, asks, _LINGER_S, hang_up=True)
    others = sum(other.cpu_s() - was for other, was in zip(idle, before, strict=True))
    kinds = [_kind(ask.deadline_ms / 1000) for ask in asks]
    return OfferedTurn.of(asks, results, load.warm_s, load.window_s, kinds), others
