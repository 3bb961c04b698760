"""Parses a model's output while it grows: reasoning, content, and calls of its tools."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.parsing.calls import Schemas
from orchestrator.parsing.formats import READERS, CallFormat, OutputFormat
from orchestrator.parsing.json_call import WHITESPACE
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallFails,
    Content,
    Piece,
    Reasoning,
)
from orchestrator.parsing.reasoning import ReasoningReader
from orchestrator.tasks.job import Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request: at least one."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    only: str = ""
    """Name of the tool that must be called; empty: any tool."""
    only_one_call: bool = False

    @property
    def schemas(self) -> Schemas:
        """Argument schemas of the tools that may be called, by name."""
        return {tool.name: tool.parameters for tool in self.callable}

    @property
    def free_texts(self) -> frozenset[str]:
        """Names of the free-text tools."""
        return frozenset(tool.name for tool in self.tools if tool.is_free_text)

    @property
    def forced(self) -> str:
        """Name of the only possible tool if a call is required; otherwise empty."""
        names = self.schemas
        return next(iter(names)) if self.must_call and len(names) == 1 else ""

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if not self.only or tool.name == self.only)


class OutputParser:
    """Reads one output. The result does not depend on how the text is split into pieces."""

    __slots__ = ("_calls", "_forced", "_reasoning")

    def __init__(
        self,
        format: OutputFormat,
        *,
        tools: Schemas | None = None,
        only_one_call: bool = False,
        forced: str = "",
        prompt_end: str = "",
    ) -> None:
        """``tools`` may be called (None: no calls); ``forced`` must be called. ``prompt_end`` is
        the prompt's last text. It shows whether the template has begun the reasoning."""
        self._forced = forced
        self._reasoning = None
        is_harmony = format.calls is CallFormat.HARMONY
        if format.reasoning is not None and not is_harmony:
            is_open = prompt_end.rstrip(WHITESPACE).endswith(format.reasoning.open)
            self._reasoning = ReasoningReader(format.reasoning, is_open=is_open)
        self._calls = None
        if format.calls is not None and (tools is not None or is_harmony):
            self._calls = READERS[format.calls](tools or {}, only_one=only_one_call)

    @property
    def calls_made(self) -> int:
        """Number of complete tool calls so far."""
        return 0 if self._calls is None else self._calls.made

    def feed(self, text: str) -> Sequence[Piece]:
        """Read more text and return its pieces. Some text may be held back."""
        if not text:
            return ()
        if self._reasoning is not None:
            out: list[Piece] = []
            rest = self._reasoning.feed(text, out)
            if self._reasoning.is_over:
                self._reasoning = None
                out += self.feed(rest)
            return out
        return (Content(text),) if self._calls is None else self._calls.feed(text)

    def finish(self, tail: str = "", *, is_cut: bool = False) -> Sequence[Piece]:
        """End the output with ``tail``. ``is_cut``: a limit ended it, not the model."""
        out = list(self.feed(tail))
        forced = self._forced
        if self._reasoning is not None:
            reasoning, self._reasoning = self._reasoning, None
            forced = "" if reasoning.has_begun else forced
            out += self.feed(reasoning.finish(out))
        if self._calls is not None:
            out += self._calls.finish(is_cut=is_cut, forced=forced)
        return out


@dataclass(slots=True)
class ParsedCall:
    name: str
    arguments: str = ""
    """Arguments as the model's JSON object."""
    is_cut: bool = False
    """Whether the arguments are an incomplete object."""


@dataclass(slots=True)
class Output:
    """A whole output."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def collect(pieces: Iterable[Piece]) -> Output:
    """Join the pieces. A failed call is content, unless it was cut."""
    output = Output()
    calls: dict[int, ParsedCall] = {}
    for piece in pieces:
        match piece:
            case Content(text):
                output.content += text
            case Reasoning(text):
                output.reasoning += text
            case CallBegins(index, name):
                calls[index] = ParsedCall(name)
            case CallArguments(index, json):
                calls[index].arguments += json
            case CallFails(index, _, is_cut=True):
                calls[index].is_cut = True
            case CallFails(index, text):
                del calls[index]
                output.content += text
    output.calls = list(calls.values())
    return output
