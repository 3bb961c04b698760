"""Reads tool calls in the formats of model families while the model writes them.

If text begins like a call but is not one, it becomes content again, exactly as the model wrote it.
White space around calls is dropped, so that an answer with only calls has no content.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from orchestrator.parsing.bare_call import QUOTE, BareCall
from orchestrator.parsing.json_call import (
    WHITESPACE,
    JsonCall,
    ListedCall,
    MarkedCall,
    Reading,
    Wrong,
)
from orchestrator.parsing.markers import certain, first_of, has_too_much_space, without_space
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
)
from orchestrator.parsing.tagged_call import (
    GLM45,
    QWEN3_CODER,
    TaggedCall,
    TagSyntax,
)
from orchestrator.tasks.job import JsonObject

Schemas = Mapping[str, JsonObject | None]
"""Argument schemas of the tools that may be called, by tool name."""


class CallReader(ABC):
    """Separates calls from the text of an answer."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Markers at the start of a call."""
    behind: ClassVar[tuple[str, ...]] = ()
    """Markers that may follow a call."""
    inside: ClassVar[tuple[str, ...]] = ()
    """Markers that may occur within a call."""

    def __init__(self, tools: Schemas, *, only_one: bool = False) -> None:
        """``only_one``: everything after the first call is dropped."""
        self.made = 0
        """Number of complete calls."""
        self._tools = tools
        self._only_one = only_one
        self._read: Callable[[str], str] = self._begin
        self._out: list[Piece] = []
        self._held = ""
        """Held text: it may be part of a marker or white space before a marker."""
        self._index = 0
        self._call: MarkedCall = JsonCall()
        self._raw: list[str] = []
        """The model's text of the current call."""
        self._is_told = False
        """Whether the start of the current call was emitted."""
        self._follows_call = False
        self._has_failed = False
        """Whether text began like a call but was not one."""

    def feed(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        while text:
            text = self._read(text)
        out, self._out = self._out, []
        return out

    def finish(self, *, is_cut: bool = False, forced: str = "") -> list[Piece]:
        """End the output. ``is_cut``: a limit cut the output. If the tool ``forced`` had to be
        called, then its call was cut."""
        is_calling = self._read == self._in_call
        if is_cut and forced and not (self.made or self._has_failed or self._is_told):
            raw = "".join(self._raw) if is_calling else self._held
            self._out += [CallBegins(0, forced), CallFails(0, raw, is_cut)]
        elif is_calling:
            self._end_badly(is_cut=is_cut)
        elif self._held and not (self._follows_call and self._is_idle(self._held)):
            self._out.append(Content(self._held))
        self._held = ""
        out, self._out = self._out, []
        return out

    # steps that formats define; each returns the rest of the text

    @abstractmethod
    def _begin(self, text: str) -> str:
        """Read the start of an answer."""

    def _behind_call(self, text: str) -> str:
        """Skip markers that may follow a call, and the white space before them."""
        while not has_too_much_space(text, start := text.lstrip(WHITESPACE)):
            marker = next((marker for marker in self.behind if start.startswith(marker)), "")
            if not marker:
                if any(marker.startswith(start) for marker in self.behind):
                    self._held = text
                    return ""
                break
            text = start[len(marker) :]
        self._read = self._begin
        return text

    def _resume(self) -> None:
        """Continue after text that was not a call."""
        self._read = self._begin

    def _is_idle(self, text: str) -> bool:
        """Whether ``text`` has no meaning after the last call."""
        left = text.strip(WHITESPACE)
        return not left or any(mark.startswith(left) for mark in self.behind)

    # shared by all formats

    def _begin_call(self, call: MarkedCall, raw: str = "") -> None:
        self._call = call
        self._raw = [raw]
        self._is_told = False
        self._read = self._in_call

    def _in_call(self, text: str) -> str:
        call = self._call
        try:
            read = call.feed(text)
        except Wrong as wrong:
            self._raw.append(text[: wrong.at])
            self._end_badly()
            self._resume()
            return text[wrong.at :]
        self._raw.append(text[:read])
        if call.name:
            if not self._is_told:
                self._is_told = True
                self._out.append(CallBegins(self._index, call.name))
            if new := call.take():
                self._out.append(CallArguments(self._index, new))
        if call.is_over:
            self._out.append(CallEnds(self._index))
            self._index += 1
            self.made += 1
            self._follows_call = True
            self._read = self._ignore if self._only_one else self._behind_call
        return text[read:]

    def _end_badly(self, *, is_cut: bool = False) -> None:
        raw = "".join(self._raw)
        self._has_failed = True
        self._follows_call = False
        if self._is_told:
            self._out.append(CallFails(self._index, raw, is_cut))
            self._index += 1
        else:
            self._out.append(Content(raw))

    def _ignore(self, text: str) -> str:
        return ""


class MarkReader(CallReader):
    own_mark: ClassVar = ""
    """A marker, or the end of one, that is a part of the call itself."""

    def __init__(self, tools: Schemas, *, only_one: bool = False) -> None:
        super().__init__(tools, only_one=only_one)
        self._firsts = frozenset(mark[0] for mark in self.marks)

    def _new_call(self, raw: str) -> MarkedCall:
        """A call behind its white space and marker ``raw``."""
        return JsonCall()

    def _begin(self, text: str) -> str:
        """Emit content up to the first marker."""
        if self._firsts.isdisjoint(text) and text[-1] not in WHITESPACE:
            at, end = -1, len(text)  # the usual case
        else:
            at, behind = first_of(text, self.marks)
            end = certain(text, *self.marks) if at < 0 else without_space(text, at)
        if end:
            self._follows_call = False
            self._out.append(Content(text[:end]))
        if at < 0:
            self._held = text[end:]
            return ""
        raw = text[end:behind].removesuffix(self.own_mark)
        self._begin_call(self._new_call(raw), raw)
        return text[end + len(raw) :]


class HermesReader(MarkReader):
    """Reads ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"
    marks = (OPEN,)
    behind = (CLOSE,)


class Llama3Reader(MarkReader):
    """Reads ``{"name": …, "parameters": {…}}``, with or without ``<|python_tag|>`` before it: Llama
    3.1 to 3.3. Calls may follow text. Several have ``;`` between them. Unknown names are text."""

    TAG = "<|python_tag|>"
    marks = (TAG, "{")
    own_mark = "{"
    _BETWEEN = WHITESPACE + ";,"

    def _new_call(self, raw: str) -> MarkedCall:
        return JsonCall(self._tools)

    def _behind_call(self, text: str) -> str:
        start = text.lstrip(self._BETWEEN)
        if not has_too_much_space(text, start):
            if not start or (self.TAG.startswith(start) and start != self.TAG):
                self._held = text
                return ""
            if start.startswith(("{", self.TAG)):
                size = len(text) - len(start) + (0 if start[0] == "{" else len(self.TAG))
                self._begin_call(JsonCall(self._tools), text[:size])
                return text[size:]
        self._read = self._begin
        return text

    def _is_idle(self, text: str) -> bool:
        return not text.strip(self._BETWEEN)


class MistralReader(MarkReader):
    """Reads ``[{"name": …, "arguments": {…}}, …]``, or one such object, after ``[TOOL_CALLS]``;
    newer models: ``name{…}``."""

    MARK = "[TOOL_CALLS]"
    ARGS = "[ARGS]"
    marks: ClassVar[tuple[str, ...]] = (MARK,)
    inside: ClassVar[tuple[str, ...]] = ("[CALL_ID]", ARGS)
    may_be_named: ClassVar = True
    """Whether a call without brackets around it may be ``name{…}``."""
    _is_in_list = False

    def _new_call(self, raw: str) -> MarkedCall:
        return ListedCall(may_be_named=self.may_be_named)

    def _behind_call(self, text: str) -> str:
        if isinstance(self._call, ListedCall):
            self._is_in_list = self._call.is_in_list
        if self._is_in_list:
            start = text.lstrip(WHITESPACE)
            if not start:
                self._held = text
                return ""
            if start[0] == ",":
                self._begin_call(JsonCall(), text[: len(text) - len(start) + 1])
                return start[1:]
            text = start[1:] if start[0] == "]" else text
        self._read = super()._behind_call
        return text


class GraniteReader(MistralReader):
    """``<|tool_call|>`` and a list: Granite 3."""

    marks = ("<|tool_call|>",)
    inside = ()
    may_be_named = False


class TaggedReader(MarkReader):
    """Reads calls with each argument in tags, after a marker that models sometimes omit."""

    syntax: ClassVar[TagSyntax]

    def _new_call(self, raw: str) -> MarkedCall:
        return TaggedCall(self.syntax, self._tools)


class QwenCoderReader(TaggedReader):
    """``<tool_call><function=NAME><parameter=KEY>…</parameter></function>…``: Qwen3-Coder."""

    syntax = QWEN3_CODER
    own_mark = syntax.name[0]
    marks = (HermesReader.OPEN, own_mark)
    behind = (HermesReader.CLOSE,)


class GlmReader(TaggedReader):
    """``<tool_call>NAME<arg_key>…</arg_key><arg_value>…</arg_value>…``: GLM 4.5 to 4.7."""

    syntax = GLM45
    marks = (HermesReader.OPEN,)
    inside = (syntax.end, *syntax.key, *syntax.value)


class GemmaReader(MarkReader):
    """``<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1}<tool_call|>``: Gemma 4."""

    marks = ("<|tool_call>",)
    behind = ("<tool_call|>",)
    inside = (QUOTE,)

    def _new_call(self, raw: str) -> MarkedCall:
        return BareCall()


KIMI_ID = re.compile(r"^functions\.|:\d+$", re.ASCII)
"""The text around the tool's name in a Kimi K2 id."""


class DeepSeekCall(MarkedCall):
    """One call: ``NAME<｜tool▁sep｜>{…}``, or ``function<｜tool▁sep｜>NAME`` and a fence."""

    CALL = "<｜tool▁call▁begin｜>"
    SEPARATOR = "<｜tool▁sep｜>"
    FENCE = "```json"

    def __init__(self, *, is_open: bool) -> None:
        """``is_open``: the call's first marker was already read."""
        super().__init__()
        self._is_open = is_open

    def _whole(self) -> Reading[None]:
        if not self._is_open:
            yield from self._tag(self.CALL)
        kind = yield from self._name_up_to("<")
        yield from self._tag(self.SEPARATOR)
        yield from self._behind_kind(kind)
        yield from self._object()

    def _behind_kind(self, kind: str) -> Reading[None]:
        if (yield from self._behind_space()) == "{" or kind != "function":
            self.name = kind
        else:
            self.name = yield from self._name_up_to("\n")
            yield from self._tag(self.FENCE)


class DeepSeekReader(MarkReader):
    """Reads calls of DeepSeek V3, R1 and V3.1: markers around all calls and around each call."""

    BEGIN = "<｜tool▁calls▁begin｜>"
    CLOSE = "<｜tool▁call▁end｜>"
    END = "<｜tool▁calls▁end｜>"
    marks: ClassVar[tuple[str, ...]] = (BEGIN, DeepSeekCall.CALL)
    behind: ClassVar[tuple[str, ...]] = ("```", CLOSE, END)
    inside = (DeepSeekCall.SEPARATOR,)
    call: ClassVar = DeepSeekCall

    def _new_call(self, raw: str) -> MarkedCall:
        return self.call(is_open=raw.endswith(self.call.CALL))


class KimiCall(DeepSeekCall):
    """One call: ``functions.NAME:0<|tool_call_argument_begin|>{…}``."""

    CALL = "<|tool_call_begin|>"
    SEPARATOR = "<|tool_call_argument_begin|>"

    def _behind_kind(self, kind: str) -> Reading[None]:
        yield from self._char()
        self.name = self._checked(KIMI_ID.sub("", kind))


class KimiReader(DeepSeekReader):
    """Reads calls of Kimi K2. Tool names are parts of ids."""

    BEGIN = "<|tool_calls_section_begin|>"
    CLOSE = "<|tool_call_end|>"
    END = "<|tool_calls_section_end|>"
    marks = (BEGIN, KimiCall.CALL)
    behind = (CLOSE, END)
    inside = (KimiCall.SEPARATOR,)
    call = KimiCall
