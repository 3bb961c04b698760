"""What a service recorded (``GET /admin/recording``) as a load of the simulator.

Requests are arrivals, instances are alike: as many as took work when the asked request came, as
fast as the first of them was. What the service had learned before is learned again from the
requests of the half minute before. An answer is as long as it was; one that something cut is as
long as half of such answers are that get so far, by what was known when the request came.
"""

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import msgspec

from orchestrator.prediction.step_model import StepModel
from orchestrator.tasks.deadline import Part, Parts
from orchestrator.tasks.job import Priority
from orchestrator.tasks.work import Marks
from perf.sim.arrivals import SimArrival
from perf.sim.replay.worker import WorkerSpec
from perf.sim.simulate import Fleet, SimRun, simulate
from protocol import FinishReason, OnDeadline, Outcome
from worker.runner.synthetic import StepCost

WARM_S: Final = 30.0
"""Seconds before the asked request from which on others are replayed."""
MAX_REQUESTS: Final = 400
"""Most requests that are replayed, the latest ones."""
_BEFORE_S: Final = 1.0
"""Seconds of a replay before its first request, in which the instances come up."""
_COMPARABLE: Final = (Outcome.MET, Outcome.PARTIAL, Outcome.MISSED, Outcome.REFUSED)
"""Outcomes that a replay comes to by itself; others are done to it."""


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
    is_length_stated: bool
    """Whether nothing but ``max_tokens`` ends the answer."""
    left: tuple[float, ...]
    """Equally likely lengths of the answer, in tokens, as known when it came; empty where its
    length is stated."""
    tokens: int
    marks: Marks
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
    def was_cut(self) -> bool:
        """Whether something ended its answer before it was whole."""
        is_full = self.reason is FinishReason.LENGTH and self.tokens >= self.max_tokens
        return not (self.is_length_stated or is_full or self.reason is FinishReason.STOP)

    @property
    def length(self) -> int:
        """Tokens of its answer in a replay."""
        if self.is_length_stated:
            return self.max_tokens
        if not self.was_cut or self.outcome in (Outcome.ABORTED, Outcome.FAILED):
            return max(1, self.tokens)
        longer = [round(n) for n in self.left if self.tokens < n < self.max_tokens]
        return longer[len(longer) // 2] if longer else self.max_tokens

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

    def arrival(self, begin: float) -> SimArrival:
        """The request as the simulator has it, with times since ``begin``."""
        length = self.length
        return SimArrival(
            at_s=self.arrived - begin,
            prompt_tokens=max(1, self.prompt_tokens - self.cached_tokens),
            # An answer as long as it may be counts as one whose length is stated.
            max_tokens=self.max_tokens + (not self.is_length_stated and length >= self.max_tokens),
            length=length,
            deadline_ms=1000 * (self.deadline_at - self.arrived),
            tenant=self.tenant,
            priority=self.priority,
            # A worker on virtual time has no sentences to finish; either ends in time.
            on_deadline=OnDeadline.FIT
            if self.on_deadline is OnDeadline.FINISH
            else self.on_deadline,
            first_token_ms=1000 * (self.parts.first_token_at - self.arrived),
            token_gap_ms=1000 * self.parts.token_gap_s,
        )


class InstanceAt(msgspec.Struct, frozen=True):
    """An instance at one moment."""

    at: float
    name: str
    model: str
    is_ready: bool
    """Whether it took new work."""
    context_tokens: int
    block_tokens: int
    kv_blocks: int
    """KV blocks in all; 0 where it does not tell."""
    max_running: int
    max_step_tokens: int
    min_start_ms: float
    pace: StepModel


class RecordedLoad(msgspec.Struct, frozen=True):
    """What surrounds the request that is asked about."""

    request: RecordedRequest
    requests: list[RecordedRequest]
    """Requests for the same model, in the order in which they arrived, the asked one among them."""
    instances: list[InstanceAt]
    """Instances that took work when the asked request came."""
    settings: dict[str, Any]
    is_cut: bool
    """Whether requests that shared the asked one's time were left out, or were no longer known."""

    def run(
        self, *, alone: bool = False, later_s: float = 0.0, more: int = 0, let_in: bool = False
    ) -> tuple[list[RecordedRequest], SimRun]:
        """The requests and what becomes of them, with one thing changed at most: nobody else, a
        later deadline, ``more`` instances, or no refusal of the asked one."""
        own = self.request
        requests = [own] if alone else self.requests
        begin = requests[0].arrived - _BEFORE_S
        arrivals = [one.arrival(begin) for one in requests]
        number = requests.index(own)
        if later_s:
            arrivals[number] = _later(arrivals[number], later_s)
        one = self.instances[0]
        pace, tokens = one.pace, one.block_tokens or 16
        spec = WorkerSpec(
            cost=StepCost(pace.base_ms / 1000, pace.row_ms / 1000, pace.prompt_token_ms / 1000),
            slots=one.max_running,
            kv_tokens=one.kv_blocks * tokens or one.max_running * one.context_tokens,
            step_tokens=one.max_step_tokens,
            min_start_s=one.min_start_ms / 1000,
            noise=0.0,
        )
        fleet = Fleet(spec, len(self.instances) + more, one.context_tokens, tokens)
        told = {name: value for name, value in self.settings.items() if name != "telemetry"}
        until = max(own.deadline_at, own.ended if own.outcome else 0.0) + later_s - begin
        return requests, simulate(
            arrivals,
            fleet,
            cast("dict[str, str]", told),
            seed=1,
            kept=number if let_in else None,
            linger_s=max(0.0, until - arrivals[-1].at_s) + 0.5,
        )


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

    def around(self, asked: RecordedRequest) -> RecordedLoad:
        """What surrounds a recorded request."""
        begin, over = asked.arrived - WARM_S, max(asked.deadline_at, asked.ended)
        near = [
            one
            for one in self.requests
            if one.model == asked.model and one.ended >= begin and one.arrived <= over
        ]
        near.sort(key=lambda one: one.arrived)
        last = near.index(asked) + MAX_REQUESTS // 2
        chosen = near[max(0, last - MAX_REQUESTS) : max(last, MAX_REQUESTS)]
        latest: dict[str, InstanceAt] = {}
        for state in sorted(self.states, key=lambda one: one.at):
            if state.model == asked.model and (state.at <= asked.arrived or not latest):
                latest[state.name] = state
        ready = [one for one in latest.values() if one.is_ready] or list(latest.values())
        is_cut = len(chosen) < len(near) or (
            self.is_full and self.requests[0].ended >= asked.arrived
        )
        return RecordedLoad(asked, chosen, ready, self.settings, is_cut)


def _later(arrival: SimArrival, later_s: float) -> SimArrival:
    more_ms = 1000 * later_s
    return replace(
        arrival,
        deadline_ms=arrival.deadline_ms + more_ms,
        first_token_ms=arrival.first_token_ms + more_ms,
    )


def comparable(request: RecordedRequest, asked: RecordedRequest) -> bool:
    """Whether the outcome of a request in the asked one's time tells how good a replay is."""
    return request.outcome in _COMPARABLE and asked.arrived <= request.ended <= max(
        asked.deadline_at, asked.ended
    )
