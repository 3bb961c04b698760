"""Retry-After: whether a refusal says when to come back, and how true that is."""

import asyncio
import math
import statistics
import time
from email.utils import parsedate_to_datetime
from typing import Final

from .pace import Trial
from .rules import Finding, Verdict
from .wire import Answer, Running

_NO_ROOM: Final = (429, 503)
_ASKED: Final = 5
"""Refused requests that come back."""
_MAY_FAIL: Final = 1
_TIMES: Final = 4.0
_MIN_S: Final = 2.0
_RULES: Final = ("retry.said", "retry.honest", "retry.close")


async def check(trial: Trial) -> list[Finding]:
    """Send a burst; of those refused, some come back when they were told, and one asks all the
    time."""
    await trial.settle(trial.effort.patience_s)
    count = trial.effort.burst
    trial.wire.budget.need(count + 20 * _ASKED)
    burst = [trial.wire.begin(trial.pace.short, trial.effort.patience_s) for _ in range(count)]
    try:
        await _until_refused(trial, burst)
        refused = [run.answer for run in burst if run.answer.status in _NO_ROOM]
        if not refused:
            said = f"a burst of {count} requests was not refused with 429 or 503"
            return [Finding(rule, Verdict.NOT_APPLICABLE, said) for rule in _RULES]
        return await _refused(trial, refused)
    finally:
        for run in burst:
            await run.hang_up()


async def _until_refused(trial: Trial, burst: list[Running]) -> None:
    """Wait until each was refused, or it is clear that it will not be: whoever is refused hears in
    the time in which others get their first text."""
    patience = asyncio.timeout(5 * (trial.pace.first_s + trial.pace.busy_tolerance_s))
    try:
        async with patience:
            for run in burst:
                await run.answer.started.wait()
    except TimeoutError:
        if not patience.expired():
            raise


async def _refused(trial: Trial, refused: list[Answer]) -> list[Finding]:
    told = [_told_s(answer) for answer in refused]
    waits = [wait_s for wait_s in told if wait_s is not None]
    if not waits:
        said = "no refusal said when to come back"
        others = [Finding(rule, Verdict.NOT_APPLICABLE, said) for rule in _RULES[1:]]
        return [_said(told), *others]
    return [_said(told), *await _come_back(trial, waits)]


def _told_s(answer: Answer) -> float | None:
    """Seconds that a refusal asks to wait; None where it says nothing that can be read."""
    text = answer.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _said(told: list[float | None]) -> Finding:
    silent = sum(wait_s is None for wait_s in told)
    said = f"{len(told) - silent} of {len(told)} refusals had a Retry-After that can be read"
    return Finding("retry.said", Verdict.FAIL if silent else Verdict.PASS, said)


async def _come_back(trial: Trial, waits: list[float]) -> list[Finding]:
    """The last ones refused come back: they saw the longest queue."""
    asked = waits[-_ASKED:]
    told_s = statistics.median(asked)
    if max(asked) > trial.effort.patience_s:
        said = f"{max(asked):g} s is longer than this run waits; --patience widens that"
        late = Finding("retry.honest", Verdict.UNMEASURED, said)
        return [late, _close(told_s, await _room_s(trial, told_s))]
    room, *answers = await asyncio.gather(
        _room_s(trial, told_s), *(_again(trial, wait_s) for wait_s in asked)
    )
    assert isinstance(room, float)
    served = sum(isinstance(answer, Answer) and answer.is_whole for answer in answers)
    verdict = Verdict.PASS if served >= len(asked) - _MAY_FAIL else Verdict.FAIL
    said = f"{served} of {len(asked)} were served when they came back after {told_s:g} s"
    figures = {"served": float(served), "asked": float(len(asked)), "told_s": told_s}
    return [Finding("retry.honest", verdict, said, figures), _close(told_s, room)]


async def _again(trial: Trial, wait_s: float) -> Answer:
    await asyncio.sleep(wait_s)
    return await trial.wire.chat(trial.pace.short, trial.effort.patience_s)


async def _room_s(trial: Trial, told_s: float) -> float:
    """Seconds until a client is served that asks again about ten times in the time it was told."""
    began, every_s = trial.wire.clock(), max(0.05, told_s / 10)
    while (passed_s := trial.wire.clock() - began) < trial.effort.patience_s:
        answer = await trial.wire.chat(trial.pace.short, trial.effort.patience_s - passed_s)
        if answer.is_whole:
            return passed_s
        await asyncio.sleep(every_s)
    return math.inf


def _close(told_s: float, room_s: float) -> Finding:
    rule = "retry.close"
    if math.isinf(room_s):
        return Finding(rule, Verdict.UNMEASURED, "who asked all the time was not served either")
    is_close = told_s <= max(_MIN_S, _TIMES * room_s)
    said = f"told {told_s:g} s; who asked all the time was served when asking at {room_s:.2f} s"
    figures = {"told_s": told_s, "room_s": room_s}
    return Finding(rule, Verdict.PASS if is_close else Verdict.FAIL, said, figures)
