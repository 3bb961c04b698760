"""Overload: an open loop at twice the capacity, each request with its deadline."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .expiry import NOT_TOLD
from .pace import Trial
from .rules import Finding, Verdict
from .wire import Answer, Running, together

_TIMES: Final = 2.0
"""Offered over the capacity."""
_PATIENCE: Final = 2.0
"""Deadline over an answer's time at capacity."""
_LENGTH: Final = 3
"""Deadlines that the load lasts; what comes during the first one does not count."""
_MET, _EARLY, _WASTE, _ENDS = 0.25, 0.5, 0.5, 0.95
_NO_OVERLOAD: Final = 0.9
"""Share of requests met from which on there was no overload to speak of."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that count, and what they were up against."""

    answers: Sequence[Answer]
    deadline_s: float
    limit_s: float
    """Time at which clients hang up."""
    is_told: bool

    def is_met(self, answer: Answer) -> bool:
        return answer.is_whole and answer.end_s <= self.deadline_s

    @property
    def unmet(self) -> list[Answer]:
        return [answer for answer in self.answers if not self.is_met(answer)]

    @property
    def met(self) -> float:
        """Share of requests met."""
        return 1 - len(self.unmet) / len(self.answers)

    @property
    def waste(self) -> float:
        """Share of tokens received that were for requests not met."""
        made = sum(answer.tokens for answer in self.answers)
        return sum(answer.tokens for answer in self.unmet) / made if made else 0.0

    @property
    def early(self) -> float:
        """Share of requests not met that had an error by half of their deadline."""
        heard = [
            answer
            for answer in self.unmet
            if (answer.is_refused or answer.error is not None)
            and answer.end_s <= self.deadline_s / 2
        ]
        return len(heard) / len(self.unmet) if self.unmet else math.nan

    @property
    def ended(self) -> float:
        """Share of requests that the server ended itself."""
        return sum(not answer.is_hung_up for answer in self.answers) / len(self.answers)


async def check(trial: Trial) -> list[Finding]:
    """Offer twice the capacity, then see how long the service takes to recover."""
    load = await _offered(trial)
    recovered_s = await trial.settle(load.deadline_s + trial.pace.busy_tolerance_s)
    return [*_findings(trial, load), _recovered(trial, load, recovered_s)]


async def _offered(trial: Trial) -> Load:
    pace, wire, is_told = trial.pace, trial.wire, trial.target.deadline.is_told
    deadline_s = max(trial.effort.least_deadline_s, _PATIENCE * pace.answer_s)
    limit_s = deadline_s + (pace.busy_tolerance_s if is_told else 0.0)
    every_s = pace.short / (_TIMES * pace.tokens_per_s)
    count = max(8, round(_LENGTH * deadline_s / every_s))
    wire.budget.need(count)
    began, running = wire.clock(), list[Running]()
    try:
        for number in range(count):
            await asyncio.sleep(began + number * every_s - wire.clock())
            told = trial.told(deadline_s) if is_told else None
            running.append(wire.begin(pace.short, limit_s, told=told))
        answers = await together(running)
    finally:
        for each in running:
            await each.hang_up()
    return Load(answers[count // _LENGTH :], deadline_s, limit_s, is_told)


def _findings(trial: Trial, load: Load) -> list[Finding]:
    count = len(load.answers)
    figures = {"met": load.met, "waste": load.waste, "ended": load.ended, "requests": float(count)}
    figures["deadline_ms"] = 1000 * load.deadline_s
    met = f"{load.met:.0%} of {count} requests within {load.deadline_s:.2f} s"
    findings = [_at_least("overload.met", load.met, _MET, met, figures)]
    if load.met >= _NO_OVERLOAD:
        said = f"{met}: twice the measured capacity was no overload"
        if 2 * trial.pace.streams > trial.effort.most_streams:
            said += f"; it may be larger with more than {trial.pace.streams} streams (--streams)"
        return findings + [
            Finding(f"overload.{name}", Verdict.UNMEASURED, said)
            for name in ("early", "waste", "ends")
        ]
    waste = f"{load.waste:.0%} of the tokens were for requests that were not met"
    findings.append(_at_least("overload.waste", -load.waste, -_WASTE, waste, {"waste": load.waste}))
    if not load.is_told:
        return findings + [
            Finding(f"overload.{name}", Verdict.NOT_APPLICABLE, NOT_TOLD)
            for name in ("early", "ends")
        ]
    early = f"{load.early:.0%} of those not met had an error by half of their deadline"
    ends = f"{load.ended:.0%} had ended by the deadline and the tolerance"
    return [
        *findings,
        _at_least("overload.early", load.early, _EARLY, early, {"early": load.early}),
        _at_least("overload.ends", load.ended, _ENDS, ends, {"ended": load.ended}),
    ]


def _at_least(
    rule: str, value: float, least: float, said: str, figures: dict[str, float]
) -> Finding:
    return Finding(rule, Verdict.PASS if value >= least else Verdict.FAIL, said, figures)


def _recovered(trial: Trial, load: Load, took_s: float) -> Finding:
    within_s = load.deadline_s
    if math.isinf(took_s):
        said = f"not as before {within_s:.2f} s after the last request had ended"
        return Finding("overload.recovers", Verdict.FAIL, said)
    said = f"as before {took_s:.2f} s after the last request had ended"
    verdict = Verdict.PASS if took_s <= within_s else Verdict.FAIL
    return Finding("overload.recovers", verdict, said, {"recovered_s": took_s})
