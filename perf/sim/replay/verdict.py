"""What alone would have met a request that missed: the recording once more, with one thing changed.

The replay without a change comes first. It shows how far the others can be trusted: by the share of
requests that are met in it if they were, and not if they were not, and by whether the asked one
misses again.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from orchestrator.tasks.deadline import Part
from perf.sim.replay.again import RecordedLoad, comparable
from protocol import Outcome

LATER_S: Final = 0.1
"""Resolution, in seconds, of how much later a deadline would have been met."""
MAX_LATER: Final = 4.0
"""Longest time that is tried beyond the deadline, over the time that it was given."""
MAX_LATER_S: Final = 30.0
MIN_LATER_S: Final = 5.0


class Alone(StrEnum):
    """Changes that are tried, each alone: would it have met the request?"""

    LET_IN = "let_in"
    """The request is neither refused nor given up before its deadline."""
    NOBODY_ELSE = "nobody_else"
    """The request has the instances to itself."""
    ONE_MORE_INSTANCE = "one_more_instance"
    """One more instance of its model, as fast as the others, is there all the time."""
    LATER_DEADLINE = "later_deadline"
    """The deadline is later, and everything else as it was."""


class Tried(NamedTuple):
    """A change, and whether it met the request."""

    change: Alone
    met: bool
    by_s: float = 0.0
    """How much later the deadline was, for that change: the least that met it, to 100 ms, or the
    most that was tried."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of replaying a recording."""

    compared: int
    """Number of requests whose outcome was compared with the recorded one."""
    agreed: int
    """Number of those that were met as recorded, or not met as recorded."""
    outcome: Outcome | None
    """Outcome of the asked request in the replay without a change; None where it did not end."""
    tried: tuple[Tried, ...]
    """Changes that were tried; none where the replay does not miss it."""

    @property
    def is_reproduced(self) -> bool:
        """Whether the replay, too, does not meet the request."""
        return self.outcome not in (None, Outcome.MET)


def find(recording: RecordedLoad) -> Findings:
    """Replay a recording as it was, and with each change that may have met the asked request."""
    if not recording.instances:
        return Findings(0, 0, None, ())
    asked = recording.request
    requests, run = recording.run()
    compared = [
        (one.outcome is Outcome.MET) is again.met
        for one, again in zip(requests, run.results, strict=False)
        if comparable(one, asked)
    ]
    number = requests.index(asked)
    own = run.results[number] if number < len(run.results) else None
    return Findings(
        compared=len(compared),
        agreed=sum(compared),
        outcome=None if own is None else own.outcome,
        tried=() if own is None or own.met else tuple(_tried(recording)),
    )


def _tried(recording: RecordedLoad) -> list[Tried]:
    asked = recording.request
    tried = [
        Tried(Alone.NOBODY_ELSE, _is_met(recording, alone=True)),
        Tried(Alone.ONE_MORE_INSTANCE, _is_met(recording, more=1)),
    ]
    if asked.was_given_up:
        tried.insert(0, Tried(Alone.LET_IN, _is_met(recording, let_in=True)))
    if asked.missed_part is not Part.TOKEN_GAP:
        tried.append(_later(recording))
    return tried


def _later(recording: RecordedLoad) -> Tried:
    """The least by which a later deadline is met, by halves: more time is taken to be no worse."""
    asked = recording.request
    given_s = asked.deadline_at - asked.arrived
    met = math.ceil(min(MAX_LATER_S, max(MIN_LATER_S, MAX_LATER * given_s)) / LATER_S)
    if not _is_met(recording, later_s=met * LATER_S):
        return Tried(Alone.LATER_DEADLINE, False, met * LATER_S)
    missed = 0
    while met - missed > 1:
        middle = (missed + met) // 2
        if _is_met(recording, later_s=middle * LATER_S):
            met = middle
        else:
            missed = middle
    return Tried(Alone.LATER_DEADLINE, True, met * LATER_S)


def _is_met(recording: RecordedLoad, **change: bool | float) -> bool:
    requests, run = recording.run(**change)  # type: ignore[arg-type]
    number = requests.index(recording.request)
    return number < len(run.results) and run.results[number].met
