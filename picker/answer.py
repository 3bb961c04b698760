"""Reads an answer on its way to the client: its number of tokens so far, and how it ended.

It reads answers of every API dialect, whole or as events. It skips unreadable parts, and never
changes the answer.
"""

from typing import Final

import msgspec

from orchestrator.lanes.sse import EventReader, EventTooLong
from picker.pod import AnswerEnd

MAX_BYTES: Final = 2**20
"""Maximum bytes of a whole answer to buffer."""
_MAX_EVENT_BYTES: Final = 2**18
_ENDINGS: Final = frozenset({"stop", "end_turn", "stop_sequence", "tool_calls", "tool_use"})
_LIMITS: Final = frozenset({"length", "max_tokens"})


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


class _Piece(msgspec.Struct):
    """An event or a whole answer: the fields used here, from all dialects."""

    type: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    stop_reason: str | None = None
    status: str | None = None
    response: "_Piece | None" = None
    message: "_Piece | None" = None
    delta: _Delta | str | None = None


_decode = msgspec.json.Decoder(_Piece).decode


class AnswerReader:
    """Reads one answer's body as it passes."""

    def __init__(self, content_type: str = "", encoding: str = "") -> None:
        is_plain = not encoding or encoding == "identity"
        self._events = None
        if is_plain and content_type.startswith("text/event-stream"):
            self._events = EventReader(_MAX_EVENT_BYTES)
        is_json = content_type.partition(";")[0].strip() == "application/json"
        self._body = bytearray() if is_plain and is_json else None
        self.tokens = 0
        """Visible number of tokens so far."""
        self._choices = 1
        self._prompt_tokens = 0
        self._told = 0
        self._reason: str | None = None

    def feed(self, chunk: bytes) -> None:
        if self._events is not None:
            try:
                events = self._events.feed(chunk)
            except EventTooLong:
                self._events = None
                return
            for event in events:
                self._take(event)
        elif self._body is not None:
            if len(self._body) + len(chunk) > MAX_BYTES:
                self._body = None
            else:
                self._body += chunk

    def end(self) -> AnswerEnd | None:
        """How the answer ended, after all of it has passed; None if it does not say."""
        if self._body is not None:
            self._take(bytes(self._body))
        if self._reason is None:
            return None
        tokens = -(-self._told // self._choices) if self._told else self.tokens
        finished = self._reason not in _LIMITS
        return AnswerEnd(tokens, self._prompt_tokens, finished, is_told=self._told > 0)

    def _take(self, data: bytes) -> None:
        try:
            piece = _decode(data)
        except (msgspec.DecodeError, RecursionError):
            return
        self._choices = max(self._choices, len(piece.choices))
        self.tokens += bool(piece.choices) or piece.type.endswith("delta")
        for part in (piece, piece.response, piece.message):
            if part is not None:
                self._read(part)

    def _read(self, piece: _Piece) -> None:
        usage = piece.usage
        if usage is not None:
            self._prompt_tokens = usage.prompt_tokens or usage.input_tokens or self._prompt_tokens
            self._told = usage.completion_tokens or usage.output_tokens or self._told
        reasons = [choice.finish_reason for choice in piece.choices] + [piece.stop_reason]
        if isinstance(piece.delta, _Delta):
            reasons.append(piece.delta.stop_reason)
        if piece.status in ("completed", "incomplete"):
            reasons.append("stop" if piece.status == "completed" else "length")
        for reason in reasons:
            if reason in _ENDINGS or reason in _LIMITS:
                self._reason = reason
