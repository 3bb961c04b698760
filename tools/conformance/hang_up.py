"""Hang-ups: when what a client held serves others, seen from outside by a second set of streams."""

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from .pace import Trial
from .rules import Finding, Verdict

_FREED: Final = 0.1
"""Largest share of what a busy server costs the second set that it may cost after the hang-up."""
_LONG: Final = 6
"""Times that a long answer is longer than a short one."""
_HELD: Final = 2
"""Long answers for each stream of the capacity."""
_TOLD_APART: Final = 2.0
"""Times the tolerance by which a busy server must differ from an idle one."""


async def check(trial: Trial) -> list[Finding]:
    """Time the second set on an idle server, beside long answers, and after their clients hung
    up."""
    await trial.wave()  # the first one of its kind may compile or allocate
    idle = [await trial.wave() for _ in range(trial.effort.rounds)]
    start_s = await _start_s(trial)
    idle_s = statistics.median(idle)
    async with _held(trial):
        busy_s = await trial.wave()
    findings = []
    for name, begun_s in (("stream", None), ("whole", 1.5 * start_s + trial.pace.busy_gap_s)):
        after = [await _after(trial, begun_s) for _ in idle]
        findings.append(_judged(f"hangup.{name}", trial, idle_s, busy_s, statistics.median(after)))
    return findings


async def _start_s(trial: Trial) -> float:
    """Seconds until the long streams have begun."""
    await trial.settle(trial.effort.patience_s)
    began = trial.wire.clock()
    async with _held(trial):
        took_s = trial.wire.clock() - began
    await trial.settle(trial.effort.patience_s)
    return took_s


@asynccontextmanager
async def _held(trial: Trial, begun_s: float | None = None) -> AsyncIterator[None]:
    """Run long answers during the body, two for each stream of the capacity, half of which have
    begun at least; their clients hang up at its end. With ``begun_s`` they are not streamed, and
    as many are sure to have begun after so many seconds."""
    count, patience_s = _HELD * trial.pace.streams, trial.effort.patience_s
    trial.wire.budget.need(count)
    tokens = min(trial.pace.longest, _LONG * trial.pace.short)
    is_stream = begun_s is None
    running = [trial.wire.begin(tokens, patience_s, stream=is_stream) for _ in range(count)]
    try:
        if begun_s is None:
            for each in running[: trial.pace.streams]:
                await each.answer.started.wait()
        else:
            await asyncio.sleep(begun_s)
        yield
    finally:
        for each in running:
            await each.hang_up()


async def _after(trial: Trial, begun_s: float | None) -> float:
    """Seconds of the second set right after the hang-up; ``begun_s`` as ``_held`` takes it."""
    await trial.settle(trial.effort.patience_s)
    async with _held(trial, begun_s):
        pass
    return await trial.wave()


def _judged(rule: str, trial: Trial, idle_s: float, busy_s: float, after_s: float) -> Finding:
    tolerance_s = trial.pace.busy_tolerance_s
    lost_s, held_s = after_s - idle_s, busy_s - idle_s
    figures = {"idle_s": idle_s, "busy_s": busy_s, "after_s": after_s, "tolerance_s": tolerance_s}
    if held_s < _TOLD_APART * tolerance_s:
        said = (
            f"beside {_HELD * trial.pace.streams} long answers the second set took {busy_s:.3g} s,"
            f" on an idle server {idle_s:.3g}: too alike to tell"
        )
        return Finding(rule, Verdict.UNMEASURED, said, figures)
    is_free = lost_s <= max(tolerance_s, _FREED * held_s)
    said = (
        f"after the hang-up the second set took {max(0.0, lost_s):.2f} s more than on an idle"
        f" server, beside the long answers {held_s:.2f} s more"
    )
    return Finding(rule, Verdict.PASS if is_free else Verdict.FAIL, said, figures)
