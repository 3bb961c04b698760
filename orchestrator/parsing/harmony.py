"""Harmony, the format of gpt-oss. An output is a sequence of messages with headers::

    <|channel|>analysis<|message|>THOUGHT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The prompt ends with ``<|start|>assistant``. An output without a header at its start is text, for
example if a grammar determines its format from the first token.
"""

import re
from collections.abc import Callable

from orchestrator.parsing.calls import CallReader, Schemas
from orchestrator.parsing.json_call import WHITESPACE, MarkedCall, Reading
from orchestrator.parsing.markers import begun, first_of, has_too_much_space
from orchestrator.parsing.pieces import Content, Piece, Reasoning

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
"""Start of the model's thinking."""
_ENDS = (END, CALL, RETURN)
_OPENS = (START, CHANNEL, "to=")
"""Possible starts of a header. The last one continues a header that the prompt began."""
_MAX_HEADER = 256
"""Longest header in characters. Anything longer is text."""
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([A-Za-z0-9_.:-]+)", re.ASCII)
FUNCTIONS = "functions."
_BEGUN = re.compile(
    r"\s*(<\|start\|>\w*)?\s*(to=[\w.:-]*)?(<\|channel\|>\w*)?\s*(to=[\w.:-]*)?\s*"
    r"(<\|constrain\|>\w*)?\s*(<[a-z|]*)?",
    re.ASCII,
)
"""An incomplete header."""


class HarmonyCall(MarkedCall):
    """Reads the arguments of a known tool's call. No arguments are an empty object."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _whole(self) -> Reading[None]:
        if (yield from self._behind_space()) == "<":
            yield from self._tag(*_ENDS)
            self._untold = "{}"
        else:
            yield from self._object()


class HarmonyReader(CallReader):
    behind = _ENDS

    def __init__(self, tools: Schemas, *, only_one: bool = False) -> None:
        super().__init__(tools, only_one=only_one)
        self._piece: Callable[[str], Piece] = Content
        """Type of the pieces of the current message."""
        self._told: set[Callable[[str], Piece]] = set()
        self._is_new = False
        """Whether nothing of the current message was emitted yet."""

    def finish(self, *, is_cut: bool = False, forced: str = "") -> list[Piece]:
        held = self._held
        if self._read == self._in_header and _BEGUN.fullmatch(held):
            self._held = ""
        elif self._read == self._in_message:
            self._held = forced = ""
            self._tell(held)
        return super().finish(is_cut=is_cut, forced=forced)

    # the parts of an output

    def _begin(self, text: str) -> str:
        """Read the beginning of a message."""
        start = text.lstrip(WHITESPACE)
        if not has_too_much_space(text, start):
            if any(mark.startswith(start) and mark != start for mark in _OPENS):
                self._held = text
                return ""
            if start.startswith(_OPENS):
                self._read = self._in_header
                return text
        self._resume()
        return text

    def _in_header(self, text: str) -> str:
        at = text.find(MESSAGE)
        if at > _MAX_HEADER or (at < 0 and len(text) >= _MAX_HEADER + len(MESSAGE)):
            start = text.lstrip(WHITESPACE)
            mark = next(mark for mark in _OPENS if start.startswith(mark))
            self._resume()
            size = len(text) - len(start) + len(mark)
            self._tell(text[:size])
            return text[size:]
        if at < 0:
            self._held = text
            return ""
        header, behind = text[:at], at + len(MESSAGE)
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(FUNCTIONS)
        is_function = recipient is not None and recipient[1] != name
        if name and (name in self._tools or (is_function and self._tools)):
            self._begin_call(HarmonyCall(name), text[:behind])
        else:
            self._begin_message(Reasoning if f"{CHANNEL}analysis" in header else Content)
        return text[behind:]

    def _in_message(self, text: str) -> str:
        at, behind = first_of(text, (*_ENDS, START, CHANNEL))
        if at < 0:
            certain = len(text) - max(begun(text, mark) for mark in MARKS)
            self._held = text[certain:]
            self._tell(text[:certain])
            return ""
        self._tell(text[:at])
        self._read = self._begin
        return text[behind if text[at:behind] in _ENDS else at :]

    def _resume(self) -> None:
        self._begin_message(Content)

    def _is_idle(self, text: str) -> bool:
        left = text.strip(WHITESPACE)
        return any(mark.startswith(left) for mark in (*_ENDS, *_OPENS))

    # inside

    def _begin_message(self, piece: Callable[[str], Piece]) -> None:
        self._piece = piece
        self._is_new = True
        self._read = self._in_message

    def _tell(self, text: str) -> None:
        """Pass on more of the message; a second message of the same kind is a new paragraph."""
        if not text:
            return
        if self._is_new and self._piece in self._told:
            text = f"\n\n{text}"
        self._is_new = False
        self._told.add(self._piece)
        self._follows_call = False
        self._out.append(self._piece(text))
