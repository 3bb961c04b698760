"""Explanations of misses on the real stack: how far replays agree with what happened.

Stories are asked for at about twice the rate that the demo engine keeps up with, with deadlines of
0.3 to 3 s. Then some of those that missed are asked about. Each answer says how many requests were
met or not in its replay as they were, and whether the asked one missed again.
"""

import random
from typing import Any, Final

import aiohttp

from perf.load.connection import HOST
from perf.report.bundle import Figure
from perf.service.asking import ask_at_random, story_request
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec

PER_S: Final = 12.0
SECONDS, FEW_SECONDS = 90.0, 10.0
MISSES, FEW_MISSES = 30, 3
DEADLINES_MS: Final = (300.0, 3000.0)
_WARM: Final = 0.2
"""Share of the requests, the first ones, that are not asked about."""


async def run(context: Context) -> list[Figure]:
    stack = await context.stack(StackSpec("torch", device=context.device))
    connector = aiohttp.TCPConnector(limit=0)
    seconds, misses = (FEW_SECONDS, FEW_MISSES) if context.quick else (SECONDS, MISSES)
    async with aiohttp.ClientSession(f"http://{HOST}:{stack.port}", connector=connector) as session:
        missed = await _missed(session, seconds)
        step = max(1, len(missed) // misses)
        found = [await _explained(session, name) for name in missed[::step][:misses]]
    agreed, compared = (sum(one[key] for one in found) for key in ("agreed", "compared"))
    label = "explanations on the real stack"
    return [
        Figure.of(
            "explanations.agreement",
            f"{label}: of {compared} requests, met or not in a replay as they were",
            "",
            [agreed / compared],
            better="higher",
        ),
        Figure.of(
            "explanations.reproduced",
            f"{label}: of {len(found)} misses, missed again",
            "",
            [sum(one["reproduced"] for one in found) / len(found)],
            better="higher",
        ),
        Figure.of(
            "explanations.took_ms",
            f"{label}: CPU time of one",
            "ms",
            [one["took_ms"] for one in found],
        ),
    ]


async def _missed(session: aiohttp.ClientSession, seconds: float) -> list[str]:
    """Names of the requests that missed, in the order in which they came."""
    rng, missed = random.Random(3), list[int]()

    async def ask(number: int) -> None:
        body = story_request(rng, DEADLINES_MS)
        named = {"X-Correlation-Id": f"asked-{number}"}
        async with session.post("/v1/chat/completions", json=body, headers=named) as response:
            await response.read()
            if response.status != 200:
                missed.append(number)

    count = await ask_at_random(PER_S, seconds, rng, ask)
    return [f"asked-{number}" for number in sorted(missed) if number >= _WARM * count]


async def _explained(session: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    """What an explanation says of its replay."""
    async with session.get(f"/v2/tasks/{name}/explanation") as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        replay: dict[str, Any] = answer["replay"]
        return replay


BENCH = Bench("explanations", "why requests missed, replayed", run, limit_s=900.0, in_quick=False)
