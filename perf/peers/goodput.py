"""Requests met in time: the same arrivals go to each server in turns, at each offered rate.

Every client hangs up at its deadline. Tidegate gets each deadline with the request. The other
servers have no deadlines, so they only notice the closed connection.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace
from rich.console import Console

from perf.load.chats import PATH, STORIES, Kinds, stories
from perf.load.open_loop import StreamRequest
from perf.load.outcomes import Cell, OfferedTurn
from perf.peers.servers import MODEL, Served
from perf.report.bundle import Figure

_WARM_PER_S = 12.0
_FLOOD = 48
"""Number of simultaneous requests for the measurement of the capacity."""
_FLOOD_S = 120.0


class GoodputLoad(NamedTuple):
    """``rates`` are offered requests per second, or times the capacity with ``of_capacity``;
    ``rounds`` turns of either server at each, in which requests count that come within ``window_s``
    after ``warm_s``."""

    rates: tuple[float, ...]
    warm_s: float
    window_s: float
    rounds: int
    kinds: Kinds = STORIES
    of_capacity: bool = False

    def asks(self, per_s: float, seconds: float, seed: int) -> list[StreamRequest]:
        return stories(per_s, seconds, seed, MODEL, self.kinds)

    @property
    def linger_s(self) -> float:
        return max(patience_s for _, patience_s in self.kinds) + 0.25


async def measure(
    servers: Sequence[Served], load: GoodputLoad, seed: int, console: Console
) -> list[Cell]:
    """Run all rates in turns; returns a cell per rate and server."""
    capacity = await _capacity(servers[0], load, seed) if load.of_capacity else 0.0
    for server in servers:
        # The forecasts learn the pace from these, and code that compiles on first use is compiled.
        asks = load.asks(capacity or _WARM_PER_S, 2 * load.warm_s, seed - 1)
        await server.offer(PATH, asks, load.linger_s, hang_up=True)
    cells = []
    for factor in load.rates:
        rate = factor * (capacity or 1.0)
        turns: dict[str, list[OfferedTurn]] = {server.name: [] for server in servers}
        idle_s: dict[str, list[float]] = {server.name: [] for server in servers}
        for number in range(load.rounds):
            for server in servers:
                turn, idle = await _turn(server, servers, load, rate, seed + number)
                console.print(f"{rate:.3g}/s {server.label}: {turn.line()}", style="dim")
                turns[server.name].append(turn)
                idle_s[server.name].append(idle)
        for server in servers:
            times = "x" * load.of_capacity
            key, title = f"goodput.{server.name}.{factor:g}{times}", f"{rate:.3g}/s"
            label = f"{title}, {server.label}: CPU of the other servers meanwhile"
            more = [
                Figure.of(f"{key}.idle_cpu_s", label, "s", idle_s[server.name], better="neither")
            ]
            if server is not servers[0]:
                own, others = turns[servers[0].name], turns[server.name]
                label = f"{title}: met by {servers[0].label} more than by {server.label}"
                more.append(met_more(f"{key}.behind_by", label, own, others))
            kinds = [_kind(patience_s) for _, patience_s in load.kinds]
            cells.append(Cell(key, title, server.label, turns[server.name], kinds, more=more))
    return cells


def met_more(
    key: str, label: str, own: Sequence[OfferedTurn], others: Sequence[OfferedTurn]
) -> Figure:
    """Requests per second met in ``own`` turns and not in ``others`` with the same requests, less
    those met in the others only. The interval is paired: it resamples requests."""
    met = [
        float(one) - float(other)
        for mine, theirs in zip(own, others, strict=True)
        for one, other in zip(mine.met, theirs.met, strict=True)
    ]
    window_s = sum(turn.window_s for turn in own)

    def per_s(drawn: Sequence[float]) -> float:
        return sum(drawn) / window_s

    return Figure.resampled(key, label, "requests/s", met, per_s, better="higher", seed=len(met))


async def _capacity(server: Served, load: GoodputLoad, seed: int) -> float:
    """Requests per second that a server answers under many requests."""
    asks = load.asks(2.0 * _FLOOD, 2.0, seed - 2)[:_FLOOD]
    flood = [replace(ask, at_s=0.0, deadline_ms=1000 * _FLOOD_S) for ask in asks]
    results = await server.offer(PATH, flood, _FLOOD_S)
    return len(flood) / max(result.end_s for result in results)


def _kind(patience_s: float) -> str:
    return f"{patience_s:g}s"


async def _turn(
    server: Served, servers: Sequence[Served], load: GoodputLoad, rate: float, seed: int
) -> tuple[OfferedTurn, float]:
    """A server's turn, and the CPU seconds of the other servers during it."""
    asks = load.asks(rate, load.warm_s + load.window_s, seed)
    idle = [other for other in servers if not server.pids.items() & other.pids.items()]
    before = [other.cpu_s() for other in idle]
    results = await server.offer(PATH, asks, load.linger_s, hang_up=True)
    others = sum(other.cpu_s() - was for other, was in zip(idle, before, strict=True))
    kinds = [_kind(ask.deadline_ms / 1000) for ask in asks]
    return OfferedTurn.of(asks, results, load.warm_s, load.window_s, kinds), others
