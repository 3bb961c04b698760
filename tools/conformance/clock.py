"""Clocks: the server's Date, and deadlines that are times of day."""

import asyncio
import math
import time
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

from .expiry import cut_answer, in_time, refusal
from .rules import Finding, inapplicable, judged, unmeasured
from .server import Server
from .target import Saying

_DATE_S: Final = 1.0
"""Resolution of the Date header in seconds."""
_AGREE_S: Final = 2.0
_LOOKS: Final = 3
_APART_S: Final = 0.7
"""Seconds between two looks, so that all of them take longer than a Date is kept that a server
writes once a second; uvicorn does, and later when its event loop is busy."""
_FAR_S, _HOUR_S = 120.0, 3600.0


class _Seen(NamedTuple):
    """``skew_s``: the server's clock, ahead of this client's; NaN where it tells none."""

    trip_s: float
    skew_s: float
    date: str


async def check(server: Server) -> list[Finding]:
    looks = [await _seen(server)]
    while len(looks) < _LOOKS:
        await asyncio.sleep(_APART_S)
        looks.append(await _seen(server))
    # A Date that was kept is too early, never too late: the latest was written last.
    seen = max(looks, key=lambda one: -math.inf if math.isnan(one.skew_s) else one.skew_s)
    if math.isnan(seen.skew_s):
        said = f"Date is {seen.date!r}" if seen.date else "there is no Date header"
        return [judged("clock.date", False, said), *await _absolute(server, 0.0)]
    agrees = abs(seen.skew_s) <= _AGREE_S + seen.trip_s
    said = f"its clock is {seen.skew_s:+.1f} s from this client's"
    date = judged("clock.date", agrees, said, skew_s=seen.skew_s, round_trip_s=seen.trip_s)
    return [date, *await _absolute(server, seen.skew_s)]


async def _seen(server: Server) -> _Seen:
    sent = time.time()
    answer = await server.get("/models")
    trip_s, date = time.time() - sent, answer.headers.get("Date", "")
    try:
        at = parsedate_to_datetime(date).timestamp() + _DATE_S / 2
    except ValueError:
        at = math.nan
    return _Seen(trip_s, at - (sent + trip_s / 2), date)


async def _absolute(server: Server, skew_s: float) -> list[Finding]:
    if (saying := server.target.absolute) is None:
        said = "no way was named to say an absolute deadline (--absolute)"
        return inapplicable(said, "clock.absolute", "clock.past")
    past = saying, saying.said(-_HOUR_S, skew_s)
    return [await _kept(server, saying, skew_s), await refusal("clock.past", server, past)]


async def _kept(server: Server, saying: Saying, skew_s: float) -> Finding:
    rule, far = "clock.absolute", await server.one((saying, saying.said(_FAR_S, skew_s)))
    if not far.is_whole:
        return judged(rule, False, f"with {_FAR_S:g} s left, a short answer: {far.outcome()}")
    cut_s, longest_s = server.cut_s(), server.longest_s
    if longest_s < 2 * (cut_s + _DATE_S):
        said = f"its longest answer takes {longest_s:.3g} s, and Date has whole seconds"
        return unmeasured(rule, said)
    answers = [
        await cut_answer(server, cut_s, (saying, saying.said(cut_s, skew_s)), slack_s=2 * _DATE_S)
        for _ in range(server.effort.rounds)
    ]
    return in_time(rule, answers, cut_s, server.tolerance_s + _DATE_S)
