"""What a service recorded (``GET /admin/recording``), and what of it surrounds one request."""

import math
from typing import Any, Final, NamedTuple

import msgspec

from orchestrator.prediction.step_model import StepModel
from orchestrator.tasks.deadline import Part, Parts
from orchestrator.tasks.job import PlacementMode, Priority
from orchestrator.tasks.work import Marks
from protocol import FinishReason, OnDeadline, Outcome

COMPARABLE: Final = (Outcome.MET, Outcome.PARTIAL, Outcome.MISSED, Outcome.REFUSED)
"""Outcomes that a replay comes to by itself; others are done to it."""
WARM_S: Final = 3.0
"""Seconds before the first request that shared its time with the asked one from which on others are
replayed too: by then the instances are as busy as they were."""
MAX_WARM: Final = 100
"""Most requests that are replayed though they ended before the asked one came, the latest ones."""
AFTER_S: Final = 60.0
"""Seconds after the deadline of the asked request up to which later ones are replayed."""
MAX_REQUESTS: Final = 400
"""Most requests that are replayed."""


class Pause(NamedTuple):
    """A time in which a running request had given its slot away."""

    at: float
    until: float = math.inf


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request, and what became of it."""

    id: str
    tenant: str
    model: str
    priority: Priority
    deadline_at: float
    parts: Parts
    on_deadline: OnDeadline
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that a prefix cache held."""
    max_tokens: int
    min_tokens: int
    is_length_stated: bool
    """Whether nothing but ``max_tokens`` ends the answer."""
    placement: PlacementMode
    placed_on: tuple[str, ...]
    left: tuple[float, ...]
    """Equally likely lengths of the answer, in tokens, as known when it came; empty where its
    length is stated."""
    is_promised: bool
    reserved_chance: float | None
    calls_left: float
    between_calls_ms: float
    is_sample: bool
    """Whether it was let through to see whether a refusal would have been right."""
    tokens: int
    marks: Marks
    instance: str
    pauses: tuple[Pause, ...]
    outcome: Outcome | None = None
    """Outcome of the request; None while it was under way."""
    code: str = ""
    reason: FinishReason | None = None
    missed_part: Part | None = None

    @property
    def arrived(self) -> float:
        return self.marks.received

    @property
    def ended(self) -> float:
        """When it ended; infinite while it was under way."""
        return math.inf if self.outcome is None else self.marks.ended

    @property
    def until(self) -> float:
        """When its time was over."""
        return max(self.deadline_at, self.ended)

    @property
    def length(self) -> int | None:
        """Tokens of the answer; None where that is not known, since something cut it."""
        if self.is_length_stated:
            return self.max_tokens
        if self.reason is FinishReason.STOP:
            return self.tokens
        is_full = self.reason is FinishReason.LENGTH and self.tokens >= self.max_tokens
        return self.max_tokens if is_full else None

    @property
    def is_miss(self) -> bool:
        """Whether its deadline, or want of time or room for it, kept it from being answered
        whole."""
        return self.outcome in (Outcome.MISSED, Outcome.PARTIAL, Outcome.REFUSED)

    @property
    def was_given_up(self) -> bool:
        """Whether it was ended before its deadline: refused, dropped from the queue or stopped."""
        is_early = self.ended < self.deadline_at - 0.001 and self.outcome is not Outcome.PARTIAL
        return self.is_miss and self.missed_part in (None, Part.WHOLE) and is_early


class InstanceAt(msgspec.Struct, frozen=True):
    """An instance at one moment."""

    at: float
    name: str
    model: str
    is_reached: bool
    """Whether any connection to it was open: jobs there are lost with the last one."""
    is_ready: bool
    """Whether it took new work."""
    context_tokens: int
    block_tokens: int
    kv_blocks: int
    """KV blocks in all; 0 where it does not tell."""
    max_running: int
    max_step_tokens: int
    min_start_ms: float
    most_rows: int
    """Jobs that were to run at once."""
    pace: StepModel


class Recording(msgspec.Struct, frozen=True):
    """What surrounds one request: all that a replay needs."""

    request: RecordedRequest
    """The request that is asked about."""
    requests: list[RecordedRequest]
    """Requests for the same model, in the order in which they arrived, the asked one among them."""
    states: list[InstanceAt]
    """States of the instances of its model, in the order of time."""
    settings: dict[str, Any]
    is_cut: bool
    """Whether requests that shared the asked one's time were left out, or were no longer known."""

    @property
    def instances(self) -> dict[str, InstanceAt]:
        """The instances as they last were, by name."""
        return {state.name: state for state in self.states}

    @property
    def compared(self) -> list[RecordedRequest]:
        """Requests whose outcome a replay is compared by: those that ended in the asked one's
        time."""
        asked = self.request
        return [
            one
            for one in self.requests
            if one.outcome in COMPARABLE and asked.arrived <= one.ended <= asked.until
        ]


class Recorded(msgspec.Struct, frozen=True):
    """All that a service recorded: requests in the order in which they ended, then those that had
    not."""

    settings: dict[str, Any]
    requests: list[RecordedRequest]
    states: list[InstanceAt]
    is_full: bool
    """Whether earlier requests may no longer have been kept."""

    @classmethod
    def read(cls, text: bytes) -> "Recorded":
        """Read what the route gave. Raises ``msgspec.MsgspecError``."""
        told = msgspec.json.decode(text, type=dict[str, Any])
        for one in told.get("requests", ()):  # what never comes is null there
            one["parts"] = {name: at for name, at in one["parts"].items() if at is not None}
        return msgspec.convert(told, cls)

    def around(self, asked: RecordedRequest) -> Recording:
        """What surrounds a recorded request."""
        last = asked.until + AFTER_S
        every = [one for one in self.requests if one.model == asked.model and one.arrived <= last]
        every.sort(key=lambda one: one.arrived)
        near = [one for one in every if one.ended >= asked.arrived and one.arrived <= asked.until]
        warm_from = near[0].arrived - WARM_S
        warm = [one for one in every if warm_from <= one.ended < asked.arrived][-MAX_WARM:]
        later = [one for one in every if one.arrived > asked.until]
        first = max(0, min(near.index(asked) - MAX_REQUESTS // 2, len(near) - MAX_REQUESTS))
        chosen = near[first : first + MAX_REQUESTS]
        room = MAX_REQUESTS - len(chosen)
        is_cut = len(chosen) < len(near) or (
            self.is_full and self.requests[0].ended >= asked.arrived
        )
        chosen += [*warm[max(0, len(warm) - room) :], *later[: max(0, room - len(warm))]]
        chosen.sort(key=lambda one: one.arrived)
        states = sorted(
            {(one.name, one.at): one for one in self.states}.values(), key=lambda one: one.at
        )
        model_of = {one.name: one.model for one in states}
        return Recording(
            request=asked,
            requests=chosen,
            states=[one for one in states if one.at <= last and model_of[one.name] == asked.model],
            settings=self.settings,
            is_cut=is_cut,
        )
