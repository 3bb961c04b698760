"""The scheduler's plan for one step, and the step's result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from protocol import PromptLogprobs, TokenLogprob
from worker.scheduler.end_reason import EndReason
from worker.scheduler.request import Request


class Row(msgspec.Struct, gc=False):
    """One request's share of a step: compute ``count`` tokens from position ``start``.

    ``samples``: whether the row reaches the request's last token, so that it samples a new one. A
    struct because each step makes one per request: it costs a quarter of a dataclass.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """One step. The first ``decodes`` rows compute one token each; chunks of prompts follow."""

    rows: list[Row]
    decodes: int
    tokens: int


@dataclass(slots=True)
class Schedule:
    """A step's ``plan`` (None if there is nothing to compute or the engine plans by itself), the
    requests admitted for it, and those that could not be admitted, with the reason."""

    plan: Plan | None
    started: list[Request]
    refused: dict[Request, EndReason] = field(default_factory=dict)


class DeviceTime(NamedTuple):
    """A step on the device's own clock, in seconds."""

    busy_s: float
    """From its first work, or its launch if the device was idle then, to its last result."""
    idle_s: float
    """Idle time of the device before that."""
    waited_s: float
    """Part of its launch in which the host waited for the previous step."""


@dataclass(slots=True)
class StepResult:
    """Result of a step: ``ids[i]`` are the new tokens of ``plan.rows[i]``, if any.

    ``logprobs[i]`` is parallel to ``ids[i]``, or None if not requested; the whole list is None if
    no row requested them. ``prompts[i]`` has the log-probabilities of the prompt tokens that row i
    read, if requested. Rows in ``not_finite`` got NaN or infinite numbers, and no tokens.
    """

    ids: list[list[int]]
    logprobs: list[list[TokenLogprob] | None] | None = None
    prompts: dict[int, list[PromptLogprobs]] | None = None
    not_finite: Sequence[int] = ()
    device: DeviceTime | None = None
    """The step's time by the device's clock; None if it has none."""
