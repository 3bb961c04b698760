"""Retry-After: whether a refusal says when to come back, and how true that is."""

import asyncio
import math
import time
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Final

from .rules import Finding, inapplicable, judged, unmeasured
from .server import Answer, Server, hang_up

_NO_ROOM: Final = (429, 503)
_ASKED: Final = 5
"""Refused requests that come back."""
_MAY_FAIL: Final = 1
_TIMES, _MIN_S = 4.0, 2.0
_RULES: Final = ("retry.said", "retry.honest", "retry.close")


async def check(server: Server) -> list[Finding]:
    """Send a burst; of the refused requests some come back when told, and one polls."""
    await server.settle(server.patience_s)
    count = server.effort.burst
    server.need(count + 20 * _ASKED)
    burst = [server.begin(server.short, server.patience_s) for _ in range(count)]
    try:
        await _until_refused(server, burst)
        refused = [answer for answer in burst if answer.status in _NO_ROOM]
        if not refused:
            said = f"a burst of {count} requests was not refused with 429 or 503"
            return inapplicable(said, *_RULES)
        told = [_told_s(answer) for answer in refused]
        waits = [wait_s for wait_s in told if wait_s is not None]
        said = f"{len(waits)} of {len(told)} refusals had a Retry-After that can be read"
        spoken = judged("retry.said", len(waits) == len(told), said)
        if not waits:
            return [spoken, *inapplicable("no refusal said when to come back", *_RULES[1:])]
        return [spoken, *await _come_back(server, waits[-_ASKED:])]
    finally:
        await hang_up(burst)


async def _until_refused(server: Server, burst: list[Answer]) -> None:
    """Wait until each was refused, or it is clear that it will not be: whoever is refused hears in
    the time in which others get their first text."""
    limit_s = 5 * (server.first_s + server.busy_tolerance_s)
    starts = [asyncio.ensure_future(answer.started.wait()) for answer in burst]
    _, late = await asyncio.wait(starts, timeout=limit_s)
    for each in late:
        each.cancel()


def _told_s(answer: Answer) -> float | None:
    """Seconds that a refusal asks to wait; None where it says nothing that can be read."""
    text = answer.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


async def _come_back(server: Server, waits: list[float]) -> list[Finding]:
    """The last ones refused come back: they saw the longest queue."""
    told_s, longest_s = median(waits), max(waits)
    if longest_s > server.patience_s:
        said = f"{longest_s:g} s is longer than this run waits; --patience widens that"
        honest = unmeasured("retry.honest", said)
        return [honest, _close(told_s, await _room_s(server, told_s))]
    again = (_again(server, wait_s) for wait_s in waits)
    room_s, served = await asyncio.gather(_room_s(server, told_s), asyncio.gather(*again))
    said = f"{sum(served)} of {len(waits)} were served when they came back after {told_s:g} s"
    figures = {"served": float(sum(served)), "asked": float(len(waits)), "told_s": told_s}
    is_kept = sum(served) >= len(waits) - _MAY_FAIL
    return [judged("retry.honest", is_kept, said, **figures), _close(told_s, room_s)]


async def _again(server: Server, wait_s: float) -> bool:
    await asyncio.sleep(wait_s)
    return (await server.one()).is_whole


async def _room_s(server: Server, told_s: float) -> float:
    """Seconds until a client is served that polls about ten times in the time it was told."""
    began, patience_s = server.clock(), server.patience_s
    while (passed_s := server.clock() - began) < patience_s:
        if (await server.chat(server.short, patience_s - passed_s)).is_whole:
            return passed_s
        await asyncio.sleep(max(0.05, told_s / 10))
    return math.inf


def _close(told_s: float, room_s: float) -> Finding:
    if math.isinf(room_s):
        return unmeasured("retry.close", "the polling client was not served either")
    said = f"told {told_s:g} s; the polling client was served when asking at {room_s:.2f} s"
    is_kept = told_s <= max(_MIN_S, _TIMES * room_s)
    return judged("retry.close", is_kept, said, told_s=told_s, room_s=room_s)
