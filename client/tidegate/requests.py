"""Options and prompts of a task, and how they are spelled on the wire; and quotes: the chance that
a task is in time, by deadline, before it is sent.

::

    quote = await client.quote("Tell me a story.", max_tokens=200, accept=0.99)
    print(quote.chance_by(2000))                       # of being done within 2 s, if sent now
    story = await client.generate(
        "Tell me a story.", max_tokens=200, reservation=quote.reservation
    )
"""

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from tidegate.deadlines import Deadline, to_seconds, told

_NOT_IN_BODY = ("deadline", "first_token", "token_gap", "reservation")


class QuotedChance(msgspec.Struct, frozen=True):
    """The chance of being in time with ``within_ms`` from the quote until the deadline, which is
    ``deadline_unix_ms`` in epoch milliseconds."""

    chance: float
    within_ms: float
    deadline_unix_ms: int


class Reservation(msgspec.Struct, frozen=True):
    """A deadline that the service holds for one request, no larger than the quoted one, which must
    come before ``held_until_unix_ms``. Later it is served as any other."""

    chance: float
    within_ms: float
    deadline_unix_ms: int
    held_until_unix_ms: int

    @property
    def left_s(self) -> float:
        """Seconds from now until the deadline, by this machine's clock."""
        return self.deadline_unix_ms / 1000 - time.time()


class Quote(msgspec.Struct, frozen=True):
    """What the service expects of one request."""

    model: str
    prompt_tokens: int
    max_tokens: int
    curve: tuple[QuotedChance, ...]
    """Chances if it is sent now, by deadline, rising."""
    stated: QuotedChance | None
    """The chance by the deadline that was stated; None if none was."""
    earliest: tuple[QuotedChance, ...]
    """The earliest deadlines that can be reserved, with 50, 90 and 99 %."""
    reservation: Reservation | None
    """What was reserved, if ``accept`` asked for it."""

    def chance_by(self, ms: float) -> float:
        """The chance of being done within ``ms``, if it is sent now: between the curve's points by
        a straight line, beyond them that of the last one."""
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


class CommonOptions(TypedDict, total=False):
    """Options that tasks and chats share.

    ``first_token`` is a deadline for that alone; then one more token is due every ``token_gap``. A
    conversation's ``session_id`` keeps what was computed for it for ``idle_keep_s`` seconds.
    ``calls_left`` is the number of calls that follow under the same deadline; ``max_run_tokens``
    and ``max_run_cost`` are the most that all calls of the run may come to. ``tell_time`` tells the
    model how much time is left, to finish at the share ``wind_down``, without tools from the share
    ``tools_until`` on.
    """

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


class TaskOptions(CommonOptions, total=False):
    """Options of a task besides its prompt; the server has a default for each.

    A ``durable`` task outlives the orchestrator; an ``idempotent`` one may get another text after
    that. A ``reservation`` of a quote states its deadline.
    """

    model: str
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int
    on_disconnect: Literal["cancel", "continue"]
    placement: Mapping[str, Any]
    durable: bool
    idempotent: bool
    reservation: Reservation | None


Prompt = str | Sequence[Message] | Sequence[int]
"""Prompt of a task: a text, the turns of a conversation, or token ids."""

Kind = Literal["messages", "prompt", "prompt_token_ids"]


def task_body(prompt: Prompt, options: TaskOptions, due_s: float | None) -> dict[str, Any]:
    """Body of a submission whose deadline is in ``due_s`` seconds; None states no deadline."""
    body: dict[str, Any] = {**told()} if kind_of(prompt) == "messages" else {}
    body |= {key: value for key, value in options.items() if key not in _NOT_IN_BODY}
    if due_s is not None:
        body["deadline_ms"] = round(due_s * 1000)
    # A gap may well be a fraction of a millisecond, and nothing rounded to 0 is accepted.
    if "first_token" in options:
        body["first_token_ms"] = to_seconds(options["first_token"]) * 1000
    if "token_gap" in options:
        body["token_gap_ms"] = to_seconds(options["token_gap"]) * 1000
    return body | prompt_fields(prompt)


def kind_of(prompt: Prompt) -> Kind:
    """Name of the wire field that ``prompt`` goes into."""
    if isinstance(prompt, str):
        return "prompt"
    return "prompt_token_ids" if prompt and isinstance(prompt[0], int) else "messages"


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Wire field of ``prompt`` with its value."""
    return {kind_of(prompt): prompt if isinstance(prompt, str) else list(prompt)}


def quote_body(
    prompt: Prompt | None,
    prompt_tokens: int | None,
    accept: float | None,
    hold: Deadline,
    options: TaskOptions,
    due_s: float | None,
) -> dict[str, Any]:
    """Body of ``POST /v2/quote``. Raises ``ValueError`` unless a prompt or its length is given."""
    if (prompt is None) is (prompt_tokens is None):
        raise ValueError("a quote needs either a prompt or prompt_tokens, its length alone")
    body = task_body("" if prompt is None else prompt, options, due_s)
    if prompt is None:
        del body["prompt"]
        body["prompt_tokens"] = prompt_tokens
    if accept is not None:
        body |= {"accept": accept, "hold_ms": to_seconds(hold) * 1000}
    return body
