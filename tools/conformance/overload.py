"""Overload: an open loop at twice the capacity, each request with its deadline."""

import asyncio
import math
from typing import Final

from .rules import NOT_TOLD, Finding, inapplicable, judged, unmeasured
from .server import Answer, Server, hang_up, together

_TIMES: Final = 2.0
"""Offered load relative to the capacity."""
_PATIENCE: Final = 2.0
"""Deadline relative to an answer's time at capacity."""
_LENGTH: Final = 3
"""Duration of the load in deadlines; requests during the first deadline do not count."""
_MET, _EARLY, _WASTE, _ENDS = 0.25, 0.5, 0.5, 0.95
_NO_OVERLOAD: Final = 0.9
"""Share of requests met from which there was no real overload."""


async def _offered(server: Server, deadline_s: float) -> list[Answer]:
    """Answers that count. Clients hang up at their deadlines, or soon after if they told them."""
    saying = server.target.deadline
    limit_s = deadline_s + (server.busy_tolerance_s if saying.is_told else 0.0)
    every_s = server.short / (_TIMES * server.tokens_per_s)
    count = max(8, round(_LENGTH * deadline_s / every_s))
    began, running = server.clock(), list[Answer]()
    try:
        for number in range(count):
            await asyncio.sleep(began + number * every_s - server.clock())
            told = saying.said(deadline_s)
            running.append(server.begin(server.short, limit_s, told=told))
        return (await together(running))[count // _LENGTH :]
    finally:
        await hang_up(running)


async def check(server: Server) -> list[Finding]:
    """Offer twice the capacity, and judge the results."""
    deadline_s = max(server.effort.least_deadline_s, _PATIENCE * server.answer_s)
    answers = await _offered(server, deadline_s)
    count, made = len(answers), sum(answer.tokens for answer in answers)
    unmet = [one for one in answers if not (one.is_whole and one.end_s <= deadline_s)]
    heard = [one for one in unmet if one.is_error and one.end_s <= deadline_s / 2]
    met = 1 - len(unmet) / count
    early = len(heard) / len(unmet) if unmet else math.nan
    waste = sum(answer.tokens for answer in unmet) / made if made else 0.0
    ended = sum(not answer.is_hung_up for answer in answers) / count
    figures = {"met": met, "waste": waste, "ended": ended, "requests": float(count)}
    figures["deadline_ms"] = 1000 * deadline_s
    said = f"{met:.0%} of {count} requests within {deadline_s:.2f} s"
    findings = [judged("overload.met", met >= _MET, said, **figures)]
    if met >= _NO_OVERLOAD:
        said += ": twice the capacity was no overload (it may be larger with more --streams)"
        return findings + [unmeasured(f"overload.{n}", said) for n in ("early", "waste", "ends")]
    said = f"{waste:.0%} of the tokens were for requests that were not met"
    findings.append(judged("overload.waste", waste <= _WASTE, said, waste=waste))
    if not server.target.deadline.is_told:
        return findings + inapplicable(NOT_TOLD, "overload.early", "overload.ends")
    said = f"{early:.0%} of those not met had an error by half of their deadline"
    findings.append(judged("overload.early", early >= _EARLY, said, early=early))
    said = f"{ended:.0%} had ended by the deadline and the tolerance"
    return [*findings, judged("overload.ends", ended >= _ENDS, said, ended=ended)]
