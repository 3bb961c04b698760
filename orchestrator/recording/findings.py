"""What a replay of a recording tells of a request that missed."""

from enum import StrEnum
from typing import Any

import msgspec

from orchestrator.recording.facts import Recording
from protocol import Outcome


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


class Tried(msgspec.Struct, frozen=True):
    """A change, and whether it met the request."""

    change: Alone
    met: bool
    by_ms: float = 0.0
    """How much later the deadline was, for that change: the least that met it, to 100 ms (where the
    time ran out, enough), or the most that was tried."""


class Findings(msgspec.Struct, frozen=True):
    """The result of replaying a recording."""

    requests: int
    """Number of requests in the replay."""
    compared: int
    """Number of requests whose outcome was compared with the recorded one."""
    agreed: int
    """Number of those that were met as recorded, or not met as recorded."""
    outcome: Outcome | None
    """Outcome of the asked request in the replay without a change; None where it did not end."""
    answer_tokens: int
    """Length of its answer in the replay."""
    is_cut: bool
    """Whether requests were left out that are no longer recorded, or too many."""
    is_length_known: bool
    """Whether that is how long the answer was, rather than how long half of such answers are."""
    tried: tuple[Tried, ...] = ()
    """Changes that were tried; none where the replay does not miss it."""
    not_tried: tuple[Alone, ...] = ()
    """Changes that there was no time for."""
    took_ms: float = 0.0

    @property
    def is_reproduced(self) -> bool:
        """Whether the replay, too, does not meet the request."""
        return self.outcome not in (None, Outcome.MET)


class ReplayQuestion(msgspec.Struct, frozen=True):
    """The input of a replaying process."""

    recording: Recording
    settings: dict[str, Any]
    """Sections of the settings by which the service decides."""
    budget_s: float
    """CPU time that the replays may take, in seconds."""
