"""Chooses the pod for a request: a pure function of the request and the pods' state.

Pods with the best chance to be in time rank first; among them, the pod with the earliest finish
(``placement.choose``, with its ties). A request is refused only if it is certain to miss on every
pod (``prediction.forecaster``), even with the minimum work that the client stated, and with steps
faster than any of the pod's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import DeadlineInfeasible, NotReady
from orchestrator.instances.candidate import Candidate
from orchestrator.placement.choose import place
from orchestrator.placement.requirements import Demand, Requirements
from orchestrator.prediction.forecast import at_share
from orchestrator.prediction.forecaster import LONG, MIN_WAIT_MS, USUAL
from orchestrator.prediction.promises import RESUBMIT_MS
from orchestrator.prediction.step_model import IDLE, Load, StepModel, Work
from orchestrator.prediction.urgency import Costs, Due, urgency

EQUAL_CHANCE = 0.05
"""Chances to be in time that differ by at most this much count as equal."""
_RETRY_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Needs:
    """One request's needs. ``lengths`` are equally likely token counts of its answer, in ascending
    order; ``least_tokens`` is the minimum that the client requested."""

    prompt_tokens: int
    lengths: Sequence[float]
    least_tokens: int
    due: Due
    home: str = ""
    """The pod that had the conversation before; it wins ties."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """One pod's state, as input of a choice."""

    candidate: Candidate
    pace: StepModel | None = None
    """Step times; None while they are unknown."""
    load: Load = IDLE
    fastest_token_ms: float = 0.0
    """Minimum ms per token of any answer there; 0 while there are too few answers."""
    is_known: bool = True
    """Whether its metrics are recent."""
    is_reachable: bool = True
    """Whether its last poll was answered."""

    @property
    def name(self) -> str:
        return self.candidate.name

    def least_ms(self, needs: Needs) -> float:
        """Minimum ms of the request there; 0 while too little is known."""
        if self.pace is None or not self.fastest_token_ms:
            return 0.0
        least = self.pace.least_ms(needs.least_tokens)  # all of the prompt may be cached
        return min(least, self.fastest_token_ms * needs.least_tokens)

    def chance(self, needs: Needs) -> float:
        """Probability that the request is in time there. It is 1 while nothing is known about the
        pod, so that the pod gets requests to learn from."""
        step = self.candidate.step
        if step is None:
            return 1.0
        prompt_ms = step.prompt_token_ms + step.chunk_ms / step.step_tokens
        start_ms = step.wait_ms + step.ahead_tokens * prompt_ms
        costs = Costs(prompt_ms, step.step_ms, step.step_ms, start_ms)
        return urgency(needs.lengths, needs.prompt_tokens, needs.due, costs, MIN_WAIT_MS).chance

    def finish_ms(self, needs: Needs) -> float:
        """Expected ms until the request is done there; 0 while nothing is known."""
        step = self.candidate.step
        return 0.0 if step is None else step.finish_ms(needs.prompt_tokens, _at(needs, USUAL))


def rank(needs: Needs, prospects: Sequence[Outlook]) -> list[Outlook]:
    """All prospects, the best first: those with recent metrics, then those that may be reachable,
    then the rest; each group by chance and finish."""
    tiers: tuple[list[Outlook], ...] = ([], [], [])
    for prospect in prospects:
        tiers[0 if prospect.is_known else 1 if prospect.is_reachable else 2].append(prospect)
    return [prospect for tier in tiers for prospect in _by_chance(needs, tier)]


def require_feasible(needs: Needs, prospects: Sequence[Outlook], unix_s: float) -> None:
    """Raise ``DeadlineInfeasible`` if the request is certain to miss on every pod; ``unix_s`` is
    the current Unix time."""
    if not prospects:
        return
    left_ms = needs.due.whole_ms
    least_ms = min(p.least_ms(needs) for p in prospects)
    if least_ms < left_ms:
        return
    best = min(prospects, key=lambda p: p.finish_ms(needs))
    finish_ms = max(best.finish_ms(needs), least_ms)
    enough_ms = max(_slow_ms(needs, best), least_ms) + RESUBMIT_MS
    raise DeadlineInfeasible(
        f"{left_ms:.0f} ms remain until the deadline, but this request needs at least "
        f"{least_ms:.0f} ms: retry with a deadline {enough_ms:.0f} ms from now, which will "
        "most likely be kept, or ask for less",
        predicted_finish_ms=finish_ms,
        earliest_feasible_unix_ms=math.ceil(1000 * unix_s + enough_ms),
        binding_constraint="decode",
    )


def nobody(why: str) -> NotReady:
    """The error for a request for which there is no pod."""
    return NotReady(f"no pod can take this request now: {why}", retry_after_ms=_RETRY_MS)


def _by_chance(needs: Needs, prospects: Sequence[Outlook]) -> list[Outlook]:
    """The best by ``place`` among the best chances, then the others by chance and finish."""
    # The slowest pod that is surely in time, instead of the one that finishes first, would meet
    # 1 to 2 % more deadlines, but delay every answer.
    if not prospects:
        return []
    chances = {p.name: p.chance(needs) for p in prospects}
    best = max(chances.values())
    able = [p for p in prospects if chances[p.name] >= best - EQUAL_CHANCE]
    any_pod = prospects[0].candidate
    anywhere = Requirements(any_pod.model, any_pod.vocabulary, tokens=0)
    demand = Demand(anywhere, needs.prompt_tokens, _at(needs, USUAL), needs.home)
    first = place(demand, [p.candidate for p in able])
    assert first is not None, "pods have no limit here, so one has room"
    others = [p for p in prospects if p.name != first.name]
    others.sort(key=lambda p: (-chances[p.name], p.finish_ms(needs), p.candidate.load, p.name))
    return [next(p for p in able if p.name == first.name), *others]


def _slow_ms(needs: Needs, prospect: Outlook) -> float:
    """Ms that the request rarely exceeds there."""
    if prospect.pace is None:
        return 0.0
    return prospect.pace.upper_ms(Work(needs.prompt_tokens, 0, _at(needs, LONG)), prospect.load)


def _at(needs: Needs, share: float) -> int:
    return math.ceil(at_share(needs.lengths, share))
