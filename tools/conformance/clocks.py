"""Clocks: the server's Date, and deadlines that are times of day."""

import time
from email.utils import parsedate_to_datetime
from typing import Final

from .expiry import cut_answer, judged, refusal
from .pace import Trial
from .rules import Finding, Verdict
from .target import Saying

_DATE_S: Final = 1.0
"""Resolution of the Date header in seconds."""
_AGREE_S: Final = 2.0
_FAR_S: Final = 120.0
_HOUR_S: Final = 3600.0


async def check(trial: Trial) -> list[Finding]:
    """Compare clocks, then state absolute deadlines by the server's."""
    sent = time.time()
    answer = await trial.wire.get("/models", trial.effort.patience_s)
    trip_s = time.time() - sent
    date = answer.headers.get("Date", "")
    try:
        skew_s = parsedate_to_datetime(date).timestamp() + _DATE_S / 2 - (sent + trip_s / 2)
    except ValueError:
        said = f"Date is {date!r}" if date else "there is no Date header"
        lacking = Finding("clock.date", Verdict.FAIL, said)
        return [lacking, *await _absolute(trial, 0.0)]
    agrees = abs(skew_s) <= _AGREE_S + trip_s
    seen = Finding(
        "clock.date",
        Verdict.PASS if agrees else Verdict.FAIL,
        f"its clock is {skew_s:+.1f} s from this client's",
        {"skew_s": skew_s, "round_trip_s": trip_s},
    )
    return [seen, *await _absolute(trial, skew_s)]


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
