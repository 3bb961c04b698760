"""Hang-ups: how soon a client's resources serve others, measured by a second set of streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Final

from .rules import Finding, judged, unmeasured
from .server import Server, hang_up

_FREED: Final = 0.1
"""Maximum delay of the second set after the hang-up, as a share of its delay on a busy server."""
_LONG: Final = 6
"""Ratio of a long answer's length to a short one's."""
_HELD: Final = 2
"""Long answers per stream of the capacity."""
_TOLD_APART: Final = 2.0
"""Minimum difference between a busy and an idle server, in multiples of the tolerance."""


async def check(server: Server) -> list[Finding]:
    """Time the second set when idle, next to long answers, and after their hang-up."""
    await server.wave()  # the first one of its kind may compile or allocate
    rounds = range(server.effort.rounds)
    idle_s = median([await server.wave() for _ in rounds])
    await server.settle(server.patience_s)
    began = server.clock()
    async with _held(server):
        start_s = server.clock() - began
    await server.settle(server.patience_s)
    async with _held(server):
        busy_s = await server.wave()
    findings = []
    for name, begun_s in (("stream", None), ("whole", 1.5 * start_s + server.busy_gap_s)):
        after_s = median([await _after(server, begun_s) for _ in rounds])
        findings.append(_judged(f"hangup.{name}", server, idle_s, busy_s, after_s))
    return findings


@asynccontextmanager
async def _held(server: Server, begun_s: float | None = None) -> AsyncIterator[None]:
    """Run long answers during the body, two for each stream of the capacity, half of which have
    begun at least; their clients hang up at its end. With ``begun_s`` they are not streamed, and
    as many are sure to have begun after so many seconds."""
    count, is_stream = _HELD * server.streams, begun_s is None
    tokens, limit_s = min(server.longest, _LONG * server.short), server.patience_s
    running = [server.begin(tokens, limit_s, stream=is_stream) for _ in range(count)]
    try:
        for each in running[: server.streams] if begun_s is None else ():
            await each.started.wait()
        await asyncio.sleep(begun_s or 0.0)
        yield
    finally:
        await hang_up(running)


async def _after(server: Server, begun_s: float | None) -> float:
    await server.settle(server.patience_s)
    async with _held(server, begun_s):
        pass
    return await server.wave()


def _judged(rule: str, server: Server, idle_s: float, busy_s: float, after_s: float) -> Finding:
    tolerance_s, lost_s, held_s = server.busy_tolerance_s, after_s - idle_s, busy_s - idle_s
    figures = {"idle_s": idle_s, "busy_s": busy_s, "after_s": after_s, "tolerance_s": tolerance_s}
    if held_s < _TOLD_APART * tolerance_s:
        said = (
            f"next to {_HELD * server.streams} long answers the second set took {busy_s:.3g} s,"
            f" on an idle server {idle_s:.3g}: too alike to tell"
        )
        return unmeasured(rule, said, **figures)
    said = (
        f"after the hang-up the second set took {max(0.0, lost_s):.2f} s more than on an idle"
        f" server, next to the long answers {held_s:.2f} s more"
    )
    return judged(rule, lost_s <= max(tolerance_s, _FREED * held_s), said, **figures)
