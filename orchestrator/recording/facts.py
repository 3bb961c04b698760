"""What is recorded of a request and of an instance: times, numbers and hashes, no content.

Times are in seconds of the orchestrator's clock. Tenants are hashed with a salt of this process.
"""

import math

import msgspec

from orchestrator.prediction.step_model import StepModel
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.job import PlacementMode, Priority
from orchestrator.tasks.misses import MissStage, blame
from orchestrator.tasks.task import Task
from protocol import Code, FinishReason, OnDeadline, Outcome

COMPARABLE = (Outcome.MET, Outcome.PARTIAL, Outcome.MISSED, Outcome.REFUSED)
"""Outcomes that a replay comes to by itself; others are done to it."""
OUR_REFUSALS = (Code.DEADLINE_INFEASIBLE, Code.DEADLINE_EXCEEDED, Code.QUEUE_FULL)
"""Codes of refusals for want of time or of room; others are about the request or its sender."""


class PauseTaken(msgspec.Struct, array_like=True, gc=False):
    """A pause of a running request, which gave its slot to another one or to nobody."""

    at: float
    instance: str
    until: float = math.inf
    """When it went on; infinite if it did not."""
    left_s: float | None = None
    """What the other request had left until its deadline; None where the slot went to nobody."""
    is_for_batch: bool = False
    """Whether the other request was batch work."""


class RecordedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request, and what became of it."""

    id: str
    leader_id: str
    """Id of the first choice of the request, which its answer is called by."""
    name_hash: int
    """Hash of the correlation id."""
    key: str
    """Fingerprint of the client's key."""
    tenant: str
    model: str
    priority: Priority
    # what was asked
    arrived: float
    deadline_at: float
    first_token_at: float
    token_gap_s: float
    cut_at: float
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
    """Instances that ``placement`` is about."""
    # what was expected
    left: tuple[float, ...]
    """Equally likely lengths of the answer, in tokens, as known when it came; empty where its
    length is stated."""
    is_promised: bool
    reserved_chance: float | None
    calls_left: float
    between_calls_ms: float
    chance: float | None
    """Chance of being in time when it was first sent to a worker; None if it never was."""
    is_sample: bool
    """Whether it was let through to see whether a refusal would have been right."""
    # what became of it
    outcome: Outcome | None
    """Outcome of the request; None while it goes on."""
    code: str
    reason: FinishReason | None
    missed_part: Part | None
    blamed: MissStage | None
    """The stage to blame; None for what did not miss."""
    tokens: int
    dispatched: float
    first_token: float
    ended: float
    """When it ended; infinite while it goes on."""
    attempts: int
    """How often an instance did not finish it."""
    instance: str
    spent_ms: tuple[float, float, float, float]
    """Time in the queue, on the way, in the prompt and in the answer."""
    pauses: tuple[PauseTaken, ...]

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
        if self.outcome is Outcome.REFUSED:
            return self.code in OUR_REFUSALS
        return self.outcome in (Outcome.MISSED, Outcome.PARTIAL)

    @property
    def was_given_up(self) -> bool:
        """Whether we ended it before its deadline: refused, dropped from the queue or stopped."""
        return self.is_miss and self.missed_part in (None, Part.WHOLE) and self.is_early

    @property
    def is_early(self) -> bool:
        """Whether it ended before its deadline."""
        return self.ended < self.deadline_at - 0.001 and self.outcome is not Outcome.PARTIAL


class InstanceAt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An instance at one moment."""

    at: float
    name: str
    is_reached: bool
    """Whether any connection to it was open: jobs there are lost with the last one."""
    is_ready: bool
    """Whether it took new work."""
    most_rows: int
    """Jobs that were to run at once."""
    pace: StepModel


class InstanceFacts(msgspec.Struct, frozen=True, array_like=True):
    """What does not change while an instance serves its model."""

    name: str
    model: str
    context_tokens: int
    block_tokens: int
    kv_blocks: int
    """KV blocks in all; 0 where it does not tell."""
    max_running: int
    max_step_tokens: int
    min_start_ms: float
    abort_ms: float
    can_pause: bool
    can_continue: bool


class Recording(msgspec.Struct, frozen=True):
    """What surrounds one request: all that a replay needs."""

    asked: str
    """Id of the request that is asked about."""
    requests: list[RecordedRequest]
    """Requests for the same model, in the order in which they arrived, the asked one among them."""
    instances: list[InstanceFacts]
    states: list[InstanceAt]
    """States of these instances, in the order of time."""
    is_cut: bool
    """Whether requests that shared the asked one's time were left out, or are no longer known."""

    @property
    def request(self) -> RecordedRequest:
        """The request that is asked about."""
        return next(one for one in self.requests if one.id == self.asked)

    @property
    def compared(self) -> list[RecordedRequest]:
        """Requests whose outcome a replay is compared by: those that ended in the asked one's
        time."""
        asked = self.request
        until = max(asked.deadline_at, asked.ended)
        return [
            one
            for one in self.requests
            if one.outcome in COMPARABLE and asked.arrived <= one.ended <= until
        ]


def facts_of(
    task: Task, left: tuple[float, ...], pauses: tuple[PauseTaken, ...]
) -> RecordedRequest:
    """What is recorded of a task as it stands; ``left`` and ``pauses`` were noted on its way."""
    job, marks, ending, parts = task.job, task.marks, task.ending, task.parts
    budget = None if ending is None else ending.budget
    outcome = None if ending is None else ending.outcome
    missed = outcome in (Outcome.MISSED, Outcome.PARTIAL)
    return RecordedRequest(
        id=task.id,
        leader_id=task.leader_id,
        name_hash=hash(task.correlation_id),
        key=job.key,
        tenant=f"{hash(job.tenant) & 0xFFFFFFFF:x}" if job.tenant else "",
        model=task.model,
        priority=job.priority,
        arrived=marks.received,
        deadline_at=task.deadline.at,
        first_token_at=parts.first_token_at,
        token_gap_s=parts.token_gap_s,
        cut_at=parts.cut_at,
        on_deadline=job.on_deadline,
        prompt_tokens=task.prompt_tokens,
        cached_tokens=task.cached_tokens or task.likely_cached,
        max_tokens=1 if job.embeds else max(1, job.max_tokens or task.sampling.max_tokens),
        min_tokens=task.sampling.min_tokens,
        is_length_stated=task.sampling.length_is_stated or job.embeds,
        placement=job.placement.mode,
        placed_on=job.placement.instances,
        left=left,
        is_promised=task.is_promised,
        reserved_chance=task.reserved_chance,
        calls_left=task.calls_left,
        between_calls_ms=task.between_calls_ms,
        chance=task.given_chance,
        is_sample=task.refusal_sample,
        outcome=outcome,
        code="" if ending is None or ending.error is None else ending.error.code.value,
        reason=None if ending is None else ending.finish_reason,
        missed_part=None if ending is None else ending.missed_part,
        blamed=blame(task, ending) if ending is not None and missed else None,
        tokens=task.completion_tokens,
        dispatched=marks.dispatched,
        first_token=marks.first_token,
        ended=marks.ended if ending is not None else math.inf,
        attempts=task.attempts,
        instance=task.instance,
        spent_ms=(0.0, 0.0, 0.0, 0.0)
        if budget is None
        else (budget.queue_ms, budget.route_ms, budget.prefill_ms, budget.decode_ms),
        pauses=pauses,
    )
