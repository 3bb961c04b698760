"""Reads a request's deadline and size from its headers and its body.

The pod validates the body, so unreadable parts are ignored here. Only invalid headers of Tidegate's
own clients are refused, as in Tidegate (``api.http.deadlines``). A prompt's length is in
characters, because the picker does not have the pods' tokenizer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from multidict import CIMultiDict

from orchestrator.api.http.context import Context
from orchestrator.api.http.deadlines import read_deadline, read_parts
from orchestrator.tasks.deadline import Deadline, DeadlineConfig, Parts
from orchestrator.tasks.job import Message, Prompt
from orchestrator.tasks.prompt_kind import ANY_KIND, PromptKind, kind_of

_NOT_AWAITED: Final = ("/v2/tasks", "/v2/slots")
"""Routes whose work continues without the client, so gateways' limits do not apply."""
_TEXTS: Final = ("messages", "prompt", "input", "system", "instructions", "tools", "text_input")
"""Fields with the prompt's texts."""
_CAPS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
_NO_TEXT: Final = frozenset({"image_url", "input_audio", "source", "file", "data", "audio_url"})
"""Fields of content parts with media."""
_MAX_CAP: Final = 2**20
_MAX_DEPTH: Final = 16
_MOST: Final = 1e15
"""Larger numbers are ignored here."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A request's deadline, size and priority, if the picker can read them."""

    context: Context
    deadline: Deadline
    parts: Parts
    model: str = ""
    session: str = ""
    generates: bool = False
    """Whether a model generates the answer."""
    prompt_chars: int = 0
    prompt_ids: int = 0
    """Number of token ids in the prompt, if the prompt is token ids."""
    cap: int = 0
    """Maximum tokens of the answer; 0 if not stated."""
    least_tokens: int = 1
    """Minimum tokens that the client requires."""
    kind: PromptKind = ANY_KIND


def read_asked(
    headers: CIMultiDict[str], body: bytes | None, context: Context, config: DeadlineConfig
) -> Asking:
    """Read a request; ``body`` is None if there is none, or if it must not be read. The deadline
    and the names of ignored headers go to ``context``. Raises ``InvalidRequest``."""
    fields = _object(body)
    own_ms = _number(fields, "deadline_ms")
    path = headers.get(":path", "").partition("?")[0]
    is_awaited = not path.startswith(_NOT_AWAITED) and fields.get("background") is not True
    deadline = context.deadline = read_deadline(
        headers,
        own_ms,
        context.arrival,
        config,
        is_awaited=is_awaited,
        in_one_piece=fields.get("stream") is not True,
        ignored=context.ignored_headers,
    )
    first_token_ms, gap_ms = (_positive(fields, n) for n in ("first_token_ms", "token_gap_ms"))
    parts = read_parts(headers, first_token_ms, gap_ms, context.arrival, context.ignored_headers)
    prompt = _prompt(fields)
    if prompt is None:
        return Asking(context, deadline, parts, _text(fields, "model"))
    cap = min(_MAX_CAP, round(next(filter(None, (_positive(fields, n) for n in _CAPS)), 0)))
    return Asking(
        context,
        deadline,
        parts,
        _text(fields, "model"),
        _text(fields, "session_id") or _text(fields, "prompt_cache_key"),
        generates=True,
        prompt_chars=sum(
            len(text) for name in _TEXTS for text in _texts(fields.get(name), _MAX_DEPTH)
        ),
        prompt_ids=_ids(fields.get("prompt")),
        cap=cap,
        least_tokens=_least_tokens(fields, cap),
        kind=kind_of(prompt),
    )


def _object(body: bytes | None) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MOST:
        return None
    return float(value)


def _positive(fields: Mapping[str, Any], name: str) -> float | None:
    value = _number(fields, name)
    return value if value is not None and value > 0 else None


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value[:256] if isinstance(value, str) else ""


def _least_tokens(fields: Mapping[str, Any], cap: int) -> int:
    """Minimum number of tokens that the client requires, as in ``prediction.forecaster`` for
    tasks."""
    ends_early = fields.get("stop") or fields.get("stop_token_ids")
    may_be_cut = fields.get("on_deadline", "error") != "error"
    if fields.get("ignore_eos") is True and cap and not ends_early and not may_be_cut:
        return cap
    return max(1, min(_MAX_CAP, round(_positive(fields, "min_tokens") or 0)))


def _prompt(fields: Mapping[str, Any]) -> Prompt | None:
    """The part of the prompt that determines its kind; None if no text is requested."""
    if "messages" in fields:
        turns = fields["messages"] if isinstance(fields["messages"], list) else []
        system = "".join(_texts(fields.get("system"), _MAX_DEPTH))
        first = [Message("system", system)] if system else []
        ends = [*turns[:2], *turns[-1:]]
        return (*first, *(_message(turn) for turn in ends))
    for name in ("prompt", "text_input"):
        if name in fields:
            value = fields[name]
            if _ids(value):
                return tuple(one for one in value if isinstance(one, int))
            return "".join(_texts(value, _MAX_DEPTH))
    if "input" in fields and ("instructions" in fields or "max_output_tokens" in fields):
        return "".join(_texts(fields["input"], _MAX_DEPTH))
    return None


def _message(turn: object) -> Message:
    if not isinstance(turn, dict):
        return Message("user", "")
    return Message(_text(turn, "role"), "".join(_texts(turn.get("content"), _MAX_DEPTH)))


def _ids(value: object) -> int:
    return len(value) if isinstance(value, list) and value and isinstance(value[0], int) else 0


def _texts(value: object, depth: int) -> Iterator[str]:
    """All texts in a value, without those of media."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth:
        for one in value:
            yield from _texts(one, depth - 1)
    elif isinstance(value, dict) and depth:
        for name, one in value.items():
            if name not in _NO_TEXT and name != "type":
                yield from _texts(one, depth - 1)
