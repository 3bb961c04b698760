"""Tokens per second of either server, beside vLLM: stories of a fixed length at once.

A wave is measured: a number of requests in one instant, until the last token of the last one is at
its client. It includes first tokens and starts, for either server.
"""

from collections.abc import Sequence
from typing import NamedTuple

from perf.load.chats import PATH, at_once
from perf.load.drive import ratios
from perf.load.open_loop import Result
from perf.peers.servers import MODEL, Served
from perf.report.bundle import Figure

_LINGER_S = 60.0


class SpeedLoad(NamedTuple):
    """Waves of each number of ``streams``, ``tokens`` each, ``rounds`` of them per server."""

    streams: tuple[int, ...]
    tokens: int
    rounds: int


async def measure(
    servers: tuple[Served, Served], load: SpeedLoad, seed: int, part: str
) -> list[Figure]:
    """Both servers' rates and ours ÷ theirs, wave by wave in turns; ``part`` begins their names."""
    figures = []
    for count in load.streams:
        rates: dict[str, list[float]] = {server.name: [] for server in servers}
        for number in range(load.rounds + 1):
            for server in servers:
                asks = at_once(count, load.tokens, seed + number, MODEL)
                results = await server.offer(PATH, asks, _LINGER_S)
                if number:  # the first one warms up
                    rates[server.name].append(tokens_per_s(results, load.tokens, server.label))
        ours, theirs = (rates[server.name] for server in servers)
        figures += [
            Figure.of(
                f"{part}.{server.name}.{count}.tokens_per_s",
                f"{server.label}, {count} at once",
                "tokens/s",
                rates[server.name],
                better="higher",
            )
            for server in servers
        ]
        figures.append(
            Figure.of(
                f"{part}.ratio.{count}",
                f"{servers[0].label} ÷ {servers[1].label}, {count} at once",
                "",
                ratios(ours, theirs),
                better="higher",
            )
        )
    return figures


def tokens_per_s(results: Sequence[Result], tokens: int, label: str) -> float:
    """Tokens per second of a whole wave. Raises ``RuntimeError`` unless each stream had
    ``tokens``."""
    for result in results:
        if not result.complete or result.tokens != tokens:
            said = result.code or result.finish or "no end"
            raise RuntimeError(
                f"{label}: a stream of {tokens} tokens had {result.tokens} and ended with {said}"
            )
    return tokens * len(results) / max(result.end_s for result in results)
