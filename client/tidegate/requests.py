"""Options and prompts of a task, and their wire format. Also quotes: the chance that a task is in
time, per deadline, before it is sent."""

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from tidegate.deadlines import CallDeadline, Deadline, to_seconds, told

_NOT_IN_BODY = ("deadline", "first_token", "token_gap", "reservation")


class QuotedChance(msgspec.Struct, frozen=True):
    """The chance to be in time for a deadline ``within_ms`` after the quote;
    ``deadline_unix_ms`` is that deadline in epoch milliseconds."""

    chance: float
    within_ms: float
    deadline_unix_ms: int


class Reservation(QuotedChance, frozen=True):
    """A deadline that the service holds for one request. The request must be no larger than the
    quoted one and come before ``held_until_unix_ms``. A later one is served like any other."""

    held_until_unix_ms: int

    @property
    def left_s(self) -> float:
        """Seconds from now until the deadline, by this machine's clock."""
        return self.deadline_unix_ms / 1000 - time.time()


class Quote(msgspec.Struct, frozen=True):
    """The service's prediction for one request."""

    model: str
    prompt_tokens: int
    max_tokens: int
    curve: tuple[QuotedChance, ...]
    """Chances if it is sent now, per deadline, in ascending order."""
    stated: QuotedChance | None
    """The chance for the stated deadline; None if none was stated."""
    earliest: tuple[QuotedChance, ...]
    """The earliest deadlines that can be reserved, at 50, 90 and 99 %."""
    reservation: Reservation | None
    """The reservation, if ``accept`` asked for one."""

    def chance_by(self, ms: float) -> float:
        """The chance to finish within ``ms`` if sent now: interpolated linearly between the
        curve's points; beyond them, the chance of the last point."""
        at = bisect_right([point.within_ms for point in self.curve], ms)
        if at == 0:
            return 0.0
        before = self.curve[at - 1]
        if at == len(self.curve):
            return before.chance
        after = self.curve[at]
        part = (ms - before.within_ms) / (after.within_ms - before.within_ms)
        return before.chance + part * (after.chance - before.chance)


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class TaskOptions(TypedDict, total=False):
    """Options of a task other than its prompt; the server has a default for each.

    ``first_token`` is a deadline for the first token; after it, one token is due every
    ``token_gap``. ``session_id`` keeps a conversation's KV cache for ``idle_keep_s`` seconds.
    ``calls_left`` is the number of calls that follow under the same deadline. ``max_run_tokens``
    and ``max_run_cost`` limit all calls of the run together. ``tell_time`` tells the model how much
    time is left, to finish at the share ``wind_down``. From the share ``tools_until`` on, it has no
    tools.

    A ``durable`` task survives a restart of the orchestrator. After it, an ``idempotent`` task may
    get a different text. A ``reservation`` of a quote sets the task's deadline.
    """

    model: str
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    seed: int
    stop: str | Sequence[str]
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    on_deadline: Literal["error", "partial", "fit", "finish"]
    priority: Literal["interactive", "batch"]
    tenant: str
    session_id: str
    idle_keep_s: float
    calls_left: int
    max_run_tokens: int
    max_run_cost: float
    tell_time: bool
    wind_down: float
    tools_until: float
    deadline: Deadline
    first_token: Deadline
    token_gap: Deadline
    on_disconnect: Literal["cancel", "continue"]
    placement: Mapping[str, Any]
    durable: bool
    idempotent: bool
    reservation: Reservation | None


Prompt = str | Sequence[Message] | Sequence[int]
"""Prompt of a task: a text, the turns of a conversation, or token ids."""

Kind = Literal["messages", "prompt", "prompt_token_ids"]


def kind_of(prompt: Prompt) -> Kind:
    """Name of the wire field that ``prompt`` goes into."""
    if isinstance(prompt, str):
        return "prompt"
    return "prompt_token_ids" if prompt and isinstance(prompt[0], int) else "messages"


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Wire field of ``prompt`` with its value."""
    return {kind_of(prompt): prompt if isinstance(prompt, str) else list(prompt)}


def wire_options(options: Mapping[str, Any], deadline: CallDeadline) -> dict[str, Any]:
    """Wire fields of ``options``, with ``deadline`` for the one that they state."""
    body = {key: value for key, value in options.items() if key not in _NOT_IN_BODY}
    for name in ("first_token", "token_gap"):
        if name in options:  # not rounded: the server would refuse a gap of 0 ms
            body[f"{name}_ms"] = to_seconds(options[name]) * 1000
    if deadline.in_s is not None:
        body["deadline_ms"] = round(deadline.in_s * 1000)
    return body


def task_body(prompt: Prompt, options: TaskOptions, deadline: CallDeadline) -> dict[str, Any]:
    """Body of a submission."""
    fields = told.get() if kind_of(prompt) == "messages" else {}
    return {**fields, **wire_options(options, deadline), **prompt_fields(prompt)}
