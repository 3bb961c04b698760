"""The scheduler's plan for one step, and the step's result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from protocol import PromptLogprobs, TokenLogprob
from worker.scheduler.end_reason import EndReason
from worker.scheduler.request import Request


class Row(msgspec.Struct, gc=False):
    """One request's share of a step: compute ``count`` tokens from position ``start`` on.

    ``samples`` says that the row reaches the request's last token, so that a new one follows.
    A struct since each step makes one per request: a quarter of a dataclass's cost.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """One step. The first ``decodes`` rows compute one token each, chunks of prompts follow."""

    rows: list[Row]
    decodes: int
    tokens: int


@dataclass(slots=True)
class Schedule:
    """A step's ``plan``, None if there is nothing to compute or the engine plans by itself, the
    requests admitted for it, and those that could not be, with the reason."""

    plan: Plan | None
    started: list[Request]
    refused: dict[Request, EndReason] = field(default_factory=dict)


class DeviceTime(NamedTuple):
    """A step on the device's own clock, in seconds."""

    busy_s: float
    """From its first work, or its launch where the device was idle by then, to its last result."""
    idle_s: float
    """How long the device had nothing to do before that."""
    waited_s: float
    """Part of its launch in which the host waited for the step before."""


@dataclass(slots=True)
class StepResult:
    """Result of a step: ``ids[i]`` are the new tokens of ``plan.rows[i]``, if any.

    ``logprobs[i]`` is parallel to ``ids[i]``, or None where not asked for; the whole list is None
    when no row asked. ``prompts[i]`` has log-probabilities of what row i read of its prompt, if
    requested. Rows in ``not_finite`` got numbers that are NaN or infinite, and no tokens.
    """

    ids: list[list[int]]
    logprobs: list[list[TokenLogprob] | None] | None = None
    prompts: dict[int, list[PromptLogprobs]] | None = None
    not_finite: Sequence[int] = ()
    device: DeviceTime | None = None
    """The step's time by the device's clock; None without one."""
