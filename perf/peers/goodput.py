"""Requests met in time, beside vLLM: the same arrivals to either in turns, at each offered rate.

Every client hangs up when its patience is over. Tidegate is told each deadline; vLLM has nothing
that could be told, so it learns of one when the connection closes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from perf.peers.goodput_cell import PeerCell, ServerTurn
from perf.peers.servers import MODEL, Served
from perf.peers.stories import PATH, PATIENCE_S, stories

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
) -> list[PeerCell]:
    """Run all rates in turns; returns a cell per rate and server."""
    for server in servers:
        # The forecasts learn the pace from these, and whatever compiles on first use does so.
        asks = stories(_WARM_PER_S, 2 * load.warm_s, seed - 1, MODEL)
        await server.offer(PATH, asks, _LINGER_S, hang_up=True)
    cells = []
    for rate in load.rates:
        turns: dict[str, list[ServerTurn]] = {server.name: [] for server in servers}
        for number in range(load.rounds):
            for server in servers:
                turn = await _turn(server, servers, load, rate, seed + number)
                console.print(f"{rate:g}/s {server.label}: {turn.line()}", style="dim")
                turns[server.name].append(turn)
        cells += [
            PeerCell(server.name, server.label, rate, turns[server.name]) for server in servers
        ]
    return cells


async def _turn(
    server: Served, servers: Sequence[Served], load: GoodputLoad, rate: float, seed: int
) -> ServerTurn:
    asks = stories(rate, load.warm_s + load.window_s, seed, MODEL)
    idle = [other for other in servers if other is not server]
    before = [other.cpu_s() for other in (server, *idle)]
    results = await server.offer(PATH, asks, _LINGER_S, hang_up=True)
    own, *others = [other.cpu_s() - was for other, was in zip((server, *idle), before, strict=True)]
    measured = [
        (ask, result) for ask, result in zip(asks, results, strict=True) if ask.at_s >= load.warm_s
    ]
    return ServerTurn(measured, load.window_s, own, sum(others))
