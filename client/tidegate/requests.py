"""Options and prompts of a task, and how they are spelled on the wire."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from tidegate.deadlines import Deadline, to_seconds

if TYPE_CHECKING:
    from tidegate.quotes import Reservation

_NOT_IN_BODY = ("deadline", "first_token", "token_gap", "reservation")


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class SamplingOptions(TypedDict, total=False):
    """Options that tasks and chats share: how tokens are chosen, and where a text ends."""

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


class TaskOptions(SamplingOptions, total=False):
    """Options of a task besides its prompt; the server has a default for each.

    ``first_token`` is a deadline for that alone; then one more token is due every ``token_gap``. A
    conversation's ``session_id`` keeps what was computed for it for ``idle_keep_s`` seconds.
    ``calls_left`` are calls still to come under the same deadline. A ``durable`` task outlives the
    orchestrator; an ``idempotent`` one may get another text after that. A ``reservation`` of a
    quote states the deadline that it holds.
    """

    model: str
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    on_deadline: Literal["error", "partial", "fit", "finish"]
    on_disconnect: Literal["cancel", "continue"]
    priority: Literal["interactive", "batch"]
    tenant: str
    session_id: str
    placement: Mapping[str, Any]
    durable: bool
    idempotent: bool
    idle_keep_s: float
    calls_left: int
    deadline: Deadline
    first_token: Deadline
    token_gap: Deadline
    reservation: "Reservation | None"


Prompt = str | Sequence[Message] | Sequence[int]
"""Prompt of a task: a text, the turns of a conversation, or token ids."""

Kind = Literal["messages", "prompt", "prompt_token_ids"]


def task_body(prompt: Prompt, options: TaskOptions, due_s: float | None) -> dict[str, Any]:
    """Body of a submission whose deadline is in ``due_s`` seconds; None states no deadline."""
    body: dict[str, Any] = {key: value for key, value in options.items() if key not in _NOT_IN_BODY}
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
