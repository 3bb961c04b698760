"""Which formats a model speaks: told from its chat template, unless the operator says."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from orchestrator.parsing.calls import CallReader, HermesReader, Llama3Reader, MistralReader
from orchestrator.parsing.reasoning import Tags


class CallFormat(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"


READERS: Mapping[CallFormat, type[CallReader]] = {
    CallFormat.HERMES: HermesReader,
    CallFormat.LLAMA3: Llama3Reader,
    CallFormat.MISTRAL: MistralReader,
}
_CALL_MARKERS: Mapping[CallFormat, tuple[str, ...]] = {
    CallFormat.HERMES: (HermesReader.OPEN, HermesReader.CLOSE),
    CallFormat.LLAMA3: (Llama3Reader.TAG,),
    CallFormat.MISTRAL: (MistralReader.MARK, "[CALL_ID]", MistralReader.ARGS),
}
TAGS: Mapping[str, Tags] = {
    "think": Tags("<think>", "</think>"),
    "think_brackets": Tags("[THINK]", "[/THINK]"),
}
"""What models think in, by name."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """One model's."""

    calls: CallFormat | None = None
    """None: none that is known here."""
    reasoning: Tags | None = None
    """None: it does not think in tags."""
    names_first: bool = False
    """Of Mistral's: a call is a name and then its arguments, rather than one object."""

    @property
    def reasoning_name(self) -> str | None:
        """As the setting has it."""
        return next((name for name, tags in TAGS.items() if tags == self.reasoning), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """What its output is told apart by. Some models have special tokens for them, which no text
        shows."""
        calls = () if self.calls is None else _CALL_MARKERS[self.calls]
        return (*calls, *(self.reasoning or ()))


@dataclass(frozen=True, slots=True)
class FormatConfig:
    """What the operator says of all models: ``auto`` is what their templates say, ``none`` none."""

    tool_calls: str = "auto"
    reasoning: str = "auto"

    def of(self, chat_template: str) -> OutputFormat:
        """A model's format."""
        if self == _AUTO:
            return format_of(chat_template)
        told = format_of(chat_template)
        calls, reasoning = told.calls, told.reasoning
        if self.tool_calls != "auto":
            calls = None if self.tool_calls == "none" else CallFormat(self.tool_calls)
        if self.reasoning != "auto":
            reasoning = None if self.reasoning == "none" else TAGS[self.reasoning]
        return OutputFormat(calls, reasoning, told.names_first)


_AUTO = FormatConfig()


@lru_cache(maxsize=64)
def format_of(chat_template: str) -> OutputFormat:
    """The format that a template writes earlier turns in, and asks for."""
    names_first = MistralReader.ARGS in chat_template
    return OutputFormat(_calls_in(chat_template), _tags_in(chat_template), names_first)


def _calls_in(template: str) -> CallFormat | None:
    if MistralReader.MARK in template:
        return CallFormat.MISTRAL
    if HermesReader.OPEN in template:
        # The same tags with XML between them are another format.
        return None if "<function=" in template or "<arg_key>" in template else CallFormat.HERMES
    if Llama3Reader.TAG in template:
        return CallFormat.LLAMA3
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return CallFormat.LLAMA3
    return None


def _tags_in(template: str) -> Tags | None:
    for tags in TAGS.values():
        if tags.close in template:
            return tags
    return None
