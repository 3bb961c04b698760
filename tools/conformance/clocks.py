"""Clocks: the server's Date, and deadlines that are times of day."""

import asyncio
import math
import time
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

from .expiry import cut_answer, judged, refusal
from .pace import Trial
from .rules import Finding, Verdict
from .target import Saying

_DATE_S: Final = 1.0
"""Resolution of the Date header in seconds."""
_AGREE_S: Final = 2.0
_LOOKS: Final = 3
_APART_S: Final = 0.7
"""Seconds between two looks, so that all of them take longer than a Date is kept that a server
writes once a second; uvicorn does, and later when its event loop is busy."""
_FAR_S: Final = 120.0
_HOUR_S: Final = 3600.0


class _Seen(NamedTuple):
    trip_s: float
    skew_s: float
    """The server's clock, ahead of this client's; NaN where it tells none."""
    date: str


async def check(trial: Trial) -> list[Finding]:
    """Compare clocks, then state absolute deadlines by the server's."""
    looks = [await _seen(trial)]
    while len(looks) < _LOOKS:
        await asyncio.sleep(_APART_S)
        looks.append(await _seen(trial))
    # A Date that was kept is too early, never too late: the latest was written last.
    seen = max(looks, key=lambda one: -math.inf if math.isnan(one.skew_s) else one.skew_s)
    if math.isnan(seen.skew_s):
        said = f"Date is {seen.date!r}" if seen.date else "there is no Date header"
        return [Finding("clock.date", Verdict.FAIL, said), *await _absolute(trial, 0.0)]
    agrees = abs(seen.skew_s) <= _AGREE_S + seen.trip_s
    compared = Finding(
        "clock.date",
        Verdict.PASS if agrees else Verdict.FAIL,
        f"its clock is {seen.skew_s:+.1f} s from this client's",
        {"skew_s": seen.skew_s, "round_trip_s": seen.trip_s},
    )
    return [compared, *await _absolute(trial, seen.skew_s)]


async def _seen(trial: Trial) -> _Seen:
    sent = time.time()
    answer = await trial.wire.get("/models", trial.effort.patience_s)
    trip_s = time.time() - sent
    date = answer.headers.get("Date", "")
    try:
        skew_s = parsedate_to_datetime(date).timestamp() + _DATE_S / 2 - (sent + trip_s / 2)
    except ValueError:
        skew_s = math.nan
    return _Seen(trip_s, skew_s, date)


async def _absolute(trial: Trial, skew_s: float) -> list[Finding]:
    saying = trial.target.absolute
    if saying is None:
        said = "no way was named to say an absolute deadline (--absolute)"
        rules = ("clock.absolute", "clock.past")
        return [Finding(rule, Verdict.NOT_APPLICABLE, said) for rule in rules]
    return [
        await _kept(trial, saying, skew_s),
        await refusal("clock.past", trial, (saying, saying.said(-_HOUR_S, skew_s))),
    ]


async def _kept(trial: Trial, saying: Saying, skew_s: float) -> Finding:
    rule = "clock.absolute"
    far = await trial.wire.chat(
        trial.pace.short, trial.effort.patience_s, told=(saying, saying.said(_FAR_S, skew_s))
    )
    if not far.is_whole:
        said = f"with {_FAR_S:g} s left, a short answer: {far.outcome()}"
        return Finding(rule, Verdict.FAIL, said)
    cut_s = trial.cut_s()
    if trial.pace.longest_s < 2 * (cut_s + _DATE_S):
        said = f"its longest answer takes {trial.pace.longest_s:.3g} s, and Date has whole seconds"
        return Finding(rule, Verdict.UNMEASURED, said)
    answers = [
        await cut_answer(trial, cut_s, (saying, saying.said(cut_s, skew_s)), slack_s=2 * _DATE_S)
        for _ in range(trial.effort.rounds)
    ]
    return judged(rule, answers, cut_s, trial.pace.tolerance_s + _DATE_S)
