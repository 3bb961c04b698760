"""Tool calls in the formats of model families, read as the model writes them.

What begins like a call and is none becomes content again, exactly as it was written. White space
around calls is left out, so that an answer of nothing else has no content.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container

from orchestrator.parsing.json_call import WHITESPACE, JsonCall, NamedCall, Wrong
from orchestrator.parsing.markers import certain, has_too_much_space, without_space
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
)


class CallReader(ABC):
    """Splits the calls off the text of an answer."""

    def __init__(self, names: Container[str], *, only_one: bool = False) -> None:
        """``names`` are those of the tools. With ``only_one``, what follows a call is left out."""
        self.made = 0
        """Calls that are complete."""
        self._names = names
        self._only_one = only_one
        self._read: Callable[[str], str] = self._begin
        self._out: list[Piece] = []
        self._held = ""
        """May be part of a marker, or white space in front of one."""
        self._index = 0
        self._call: JsonCall | NamedCall = JsonCall()
        self._raw: list[str] = []
        """All that the model wrote of the call that it is at."""
        self._is_told = False
        """That call has begun for whoever listens."""
        self._follows_call = False

    def feed(self, text: str) -> list[Piece]:
        """What more text comes to."""
        while text:
            text = self._read(text)
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Piece]:
        """The output has ended."""
        if self._read == self._in_call:
            self._end_badly(is_cut=True)
        elif self._held and not (self._follows_call and self._is_idle(self._held)):
            self._out.append(Content(self._held))
        self._held = ""
        out, self._out = self._out, []
        return out

    # what a format has of its own

    @abstractmethod
    def _begin(self, text: str) -> str:
        """How an answer begins. Each of these returns what it has not read."""

    @abstractmethod
    def _behind_call(self, text: str) -> str:
        """What stands between a call and what follows."""

    @abstractmethod
    def _resume(self) -> None:
        """To go on after something that was no call."""

    def _is_idle(self, text: str) -> bool:
        """Whether it may stand behind the last call and mean nothing."""
        return not text.strip(WHITESPACE)

    # for all of them

    def _find(self, marker: str, found: Callable[[str], None], text: str) -> str:
        """Pass content on up to ``marker``; ``found`` gets what belongs to the call."""
        if not self._held and marker[0] not in text and text[-1] not in WHITESPACE:
            self._follows_call = False
            self._out.append(Content(text))  # nearly always
            return ""
        text = self._held + text
        at = text.find(marker)
        end = certain(text, marker) if at < 0 else without_space(text, at)
        self._held = ""
        if end:
            self._follows_call = False
            self._out.append(Content(text[:end]))
        if at < 0:
            self._held = text[end:]
            return ""
        behind = at + len(marker)
        found(text[end:behind])
        return text[behind:]

    def _begin_call(self, call: JsonCall | NamedCall, raw: str = "") -> None:
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
        self._follows_call = False
        if self._is_told:
            self._out.append(CallFails(self._index, raw, is_cut))
            self._index += 1
        else:
            self._out.append(Content(raw))

    def _ignore(self, text: str) -> str:
        return ""

    def _pass_on(self, text: str) -> str:
        self._out.append(Content(text))
        return ""


class HermesReader(CallReader):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def _begin(self, text: str) -> str:
        return self._find(self.OPEN, self._found, text)

    def _found(self, raw: str) -> None:
        self._begin_call(JsonCall(), raw)

    def _behind_call(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        close = text.lstrip(WHITESPACE)
        if has_too_much_space(text, close):
            self._resume()
            return text
        if self.CLOSE.startswith(close) and close != self.CLOSE:
            self._held = text
            return ""
        self._resume()
        return close.removeprefix(self.CLOSE) if close.startswith(self.CLOSE) else text

    def _resume(self) -> None:
        self._read = self._begin

    def _is_idle(self, text: str) -> bool:
        return self.CLOSE.startswith(text.strip(WHITESPACE))


class Llama3Reader(CallReader):
    """``{"name": …, "parameters": {…}}``, ``<|python_tag|>`` before it or not: Llama 3.1 to 3.3.

    Only a whole answer can be calls, separated by ``;`` where there are several: an answer that
    begins otherwise is text. So is an object with another name than a tool's.
    """

    TAG = "<|python_tag|>"
    _BETWEEN = WHITESPACE + ";,"

    def _begin(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        start = text.lstrip(self._BETWEEN if self._follows_call else WHITESPACE)
        if has_too_much_space(text, start):
            self._resume()
            return text
        if start.startswith(self.TAG):
            behind = start[len(self.TAG) :]
            self._begin_call(JsonCall(self._names), text[: len(text) - len(behind)])
            return behind
        if start.startswith("{"):
            self._begin_call(JsonCall(self._names), text[: len(text) - len(start)])
            return start
        if self.TAG.startswith(start):
            self._held = text
            return ""
        self._resume()
        return text

    def _behind_call(self, text: str) -> str:
        return self._begin(text)

    def _resume(self) -> None:
        self._read = self._pass_on

    def _is_idle(self, text: str) -> bool:
        return not text.strip(self._BETWEEN)


class MistralReader(CallReader):
    """``[TOOL_CALLS]`` and then ``[{"name": …, "arguments": {…}}, …]``, or ``name{…}``, as newer
    models have it.
    """

    MARK = "[TOOL_CALLS]"
    ARGS = "[ARGS]"

    _is_list = False

    def _begin(self, text: str) -> str:
        return self._find(self.MARK, self._found, text)

    def _found(self, raw: str) -> None:
        self._held = raw
        self._read = self._form

    def _form(self, text: str) -> str:
        """Whether it is a list, an object or a name."""
        start = text.lstrip(WHITESPACE)
        if not start:
            self._held += text
            return ""
        raw = self._held + text[: len(text) - len(start)]
        self._held = ""
        self._is_list = start[0] == "["
        if self._is_list:
            raw, start = raw + "[", start[1:]
        is_object = self._is_list or start[0] == "{"
        self._begin_call(JsonCall() if is_object else NamedCall(), raw)
        return start

    def _behind_call(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        if self._is_list:
            start = text.lstrip(WHITESPACE)
            if not start:
                self._held = text
                return ""
            if start[0] == ",":
                self._begin_call(JsonCall(), text[: len(text) - len(start) + 1])
                return start[1:]
            text = start[1:] if start[0] == "]" else text
        self._resume()
        return text

    def _resume(self) -> None:
        self._read = self._begin
