"""Quotes on the real stack: what was said of the chance to be in time, and what became of it.

Stories, lengths unknown, at a rate that the demo engine keeps up with easily, and at one at which
two in five miss deadlines of 0.3 to 3 s that nobody quoted. Each client asks for
a quote first. Four in ten send the request with the deadline that they had in mind, six in ten
reserve the earliest one with 90 or 99 %.
"""

import random
from collections import defaultdict
from typing import Any, Final

import aiohttp

from perf.load.connection import HOST
from perf.report.bundle import Figure
from perf.service.asking import ask_at_random, story_request
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec

PER_S: Final = {"light": 4.0, "busy": 14.0}
WARM_S, SECONDS, FEW_SECONDS = 40.0, 90.0, 5.0
DEADLINES_MS: Final = (300.0, 5000.0)
RESERVED: Final = (0.9, 0.99)
_RESERVE_SHARE: Final = 0.6
_BINS: Final = ((0.3, 0.7), (0.7, 0.9), (0.9, 1.01))


async def run(context: Context) -> list[Figure]:
    stack = await context.stack(StackSpec("torch", device=context.device))
    warm_s, seconds = (FEW_SECONDS, FEW_SECONDS) if context.quick else (WARM_S, SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    figures: list[Figure] = []
    async with aiohttp.ClientSession(f"http://{HOST}:{stack.port}", connector=connector) as session:
        for name, per_s in PER_S.items():
            await _Clients(session).ask(per_s, warm_s)
            clients = _Clients(session)
            await clients.ask(per_s, seconds)
            figures += clients.figures(name)
    return figures


class _Clients:
    """Clients that ask for a quote before each request."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._rng = random.Random(5)
        self.reserved: defaultdict[float, list[bool]] = defaultdict(list)
        """Whether each request was met, by the chance that it was reserved with."""
        self.quoted: list[tuple[float, bool]] = []
        """The chance that each request was said to have, and whether it was met."""
        self.refused = 0
        """Reservations that were not to be had."""

    async def ask(self, per_s: float, seconds: float) -> None:
        await ask_at_random(per_s, seconds, self._rng, self._ask)

    async def _ask(self, number: int) -> None:
        body = story_request(self._rng, DEADLINES_MS)
        accept = self._rng.choice(RESERVED) if self._rng.random() < _RESERVE_SHARE else None
        wanted = body if accept is None else body | {"accept": accept}
        async with self._session.post("/v2/quote", json=wanted) as response:
            quote: dict[str, Any] = await response.json()
            if response.status != 200:
                assert response.status == 429, quote
                self.refused += 1
                return
        if accept is None:
            self.quoted.append((quote["stated"]["chance"], await self._is_met(body, {})))
            return
        del body["deadline_ms"]
        is_met = await self._is_met(body, quote["reservation"]["headers"])
        self.reserved[accept].append(is_met)

    async def _is_met(self, body: dict[str, Any], headers: dict[str, str]) -> bool:
        url = "/v1/chat/completions"
        async with self._session.post(url, json=body, headers=headers) as response:
            await response.read()
            return response.status == 200

    def figures(self, load: str) -> list[Figure]:
        """The shares that were met."""
        found = [
            self._figure(f"{load}.reserved.{100 * chance:g}", f"reserved with {chance:.0%}", met)
            for chance, met in sorted(self.reserved.items())
        ]
        for low, high in _BINS:
            met = [met for chance, met in self.quoted if low <= chance < high]
            label = f"quoted {low:.0%} to {min(1.0, high):.0%}"
            if met:
                found.append(self._figure(f"{load}.quoted.{100 * low:g}", label, met))
        return found

    @staticmethod
    def _figure(key: str, label: str, met: list[bool]) -> Figure:
        load = key.partition(".")[0]
        share = sum(met) / len(met)
        return Figure.of(
            f"quotes.{key}",
            f"{load}: {label}, in time of {len(met)}",
            "",
            [share],
            better="neither",
        )


BENCH = Bench(
    "quotes",
    "quotes on the real stack, and what became of them",
    run,
    limit_s=500.0,
    in_quick=False,
)
