"""What alone would have met a request that missed: the recording once more, with one thing changed.

The replay without a change comes first. It shows how far the others can be trusted: by the share of
requests that are met in it if they were, and not if they were not, and by whether the asked one
misses again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from orchestrator.tasks.deadline import Part
from perf.sim.replay.again import NOTHING, OneThing, ReplayedRequest, Replayer
from perf.sim.replay.recording import RecordedLoad, RecordedRequest
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
    NOT_PAUSED = "not_paused"
    """Nobody else gets its slot once it runs."""
    ONE_MORE_INSTANCE = "one_more_instance"
    """One more instance of its model, as fast as the first one, is there all the time."""
    LATER_DEADLINE = "later_deadline"
    """The deadline is later, and everything else as it was."""
    NOBODY_ELSE = "nobody_else"
    """The request has the instances to itself."""


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
    answer_tokens: int
    """Length of its answer in the replay."""
    tried: tuple[Tried, ...]
    """Changes that were tried; none where the replay does not miss it."""

    @property
    def is_reproduced(self) -> bool:
        """Whether the replay, too, does not meet the request."""
        return self.outcome not in (None, Outcome.MET)


def find(recording: RecordedLoad) -> Findings:
    """Replay a recording as it was, and with each change that may have met the asked request."""
    asked, replayer = recording.request, Replayer(recording)
    again = replayer.run() if recording.instances else {}
    compared = [_is_alike(one, again.get(one.id)) for one in recording.compared if again]
    own = again.get(asked.id, ReplayedRequest())
    is_missed = bool(again) and own.outcome is not Outcome.MET
    tried = [_try(replayer, change) for change in _changes(asked)] if is_missed else []
    return Findings(
        compared=len(compared),
        agreed=sum(compared),
        outcome=own.outcome,
        answer_tokens=replayer.length(asked),
        tried=tuple(tried),
    )


def _is_alike(recorded: RecordedRequest, again: ReplayedRequest | None) -> bool:
    """Whether a request is met in the replay if it was, and is not if it was not."""
    return again is not None and (again.outcome is Outcome.MET) is (recorded.outcome is Outcome.MET)


def _changes(asked: RecordedRequest) -> Iterator[Alone]:
    """Changes that can make a difference; last the one that takes most replays."""
    if asked.was_given_up:
        yield Alone.LET_IN
    if asked.pauses:
        yield Alone.NOT_PAUSED
    yield Alone.NOBODY_ELSE
    yield Alone.ONE_MORE_INSTANCE
    if asked.missed_part is not Part.TOKEN_GAP:
        yield Alone.LATER_DEADLINE


def _try(replayer: Replayer, change: Alone) -> Tried:
    match change:
        case Alone.LATER_DEADLINE:
            return _later(replayer)
        case Alone.LET_IN:
            other = OneThing(is_let_in=True)
        case Alone.NOT_PAUSED:
            other = OneThing(is_never_paused=True)
        case Alone.ONE_MORE_INSTANCE:
            other = OneThing(has_one_more=True)
        case Alone.NOBODY_ELSE:
            other = OneThing(is_alone=True)
    return Tried(change, _own(replayer, other).outcome is Outcome.MET)


def _later(replayer: Replayer) -> Tried:
    """The least by which a later deadline is met, by halves: more time is taken to be no worse."""
    asked = replayer.recording.request
    given_s = asked.deadline_at - asked.arrived
    most = math.ceil(min(MAX_LATER_S, max(MIN_LATER_S, MAX_LATER * given_s)) / LATER_S)

    def end(steps: int) -> float | None:
        """When it is met with a deadline that is later by so many steps; None if it is not."""
        result = _own(replayer, OneThing(later_s=steps * LATER_S))
        return result.ended if result.outcome is Outcome.MET else None

    ended = end(most)
    if ended is None:
        return Tried(Alone.LATER_DEADLINE, False, most * LATER_S)
    missed, met = 0, most
    # With less time it is more urgent, and so it mostly ends no later.
    middle = math.ceil((ended - asked.deadline_at) / LATER_S)
    while met - missed > 1:
        if not missed < middle < met:
            middle = (missed + met) // 2
        if end(middle) is None:
            missed = middle
        else:
            met = middle
    return Tried(Alone.LATER_DEADLINE, True, met * LATER_S)


def _own(replayer: Replayer, change: OneThing) -> ReplayedRequest:
    """What becomes of the asked request."""
    assert change is not NOTHING
    return replayer.run(change).get(replayer.recording.request.id, ReplayedRequest())
