"""A model's output formats, derived from its chat template unless the operator sets them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from orchestrator.parsing import harmony
from orchestrator.parsing.calls import (
    CallReader,
    DeepSeekCall,
    DeepSeekReader,
    GemmaReader,
    GlmReader,
    GraniteReader,
    HermesReader,
    KimiCall,
    KimiReader,
    Llama3Reader,
    MistralReader,
    QwenCoderReader,
)
from orchestrator.parsing.reasoning import Tags
from orchestrator.parsing.tagged_call import GLM45


class CallFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"
    GLM45 = "glm45"
    DEEPSEEK = "deepseek"
    HARMONY = "harmony"
    KIMI_K2 = "kimi_k2"
    GEMMA4 = "gemma4"
    GRANITE = "granite"


_FORMATS: Sequence[tuple[CallFormat, type[CallReader], tuple[str, ...]]] = (
    (CallFormat.HARMONY, harmony.HarmonyReader, (harmony.CHANNEL, harmony.MESSAGE)),
    (CallFormat.DEEPSEEK, DeepSeekReader, (DeepSeekReader.BEGIN,)),
    (CallFormat.KIMI_K2, KimiReader, (KimiCall.SEPARATOR,)),
    (CallFormat.MISTRAL, MistralReader, (MistralReader.MARK,)),
    (CallFormat.GEMMA4, GemmaReader, GemmaReader.marks),
    (CallFormat.QWEN3_CODER, QwenCoderReader, QwenCoderReader.marks),
    (CallFormat.GLM45, GlmReader, (HermesReader.OPEN, GLM45.key[0])),
    (CallFormat.HERMES, HermesReader, (HermesReader.OPEN,)),
    (CallFormat.GRANITE, GraniteReader, GraniteReader.marks),
    (CallFormat.LLAMA3, Llama3Reader, (Llama3Reader.TAG,)),
    (CallFormat.LLAMA3, Llama3Reader, ("<|start_header_id|>", '"parameters"')),
)
"""The reader of each format, and the markers of its templates; the most likely format is first."""
READERS: Mapping[CallFormat, type[CallReader]] = {calls: reader for calls, reader, _ in _FORMATS}
TAGS: Mapping[str, Tags] = {
    "think": Tags("<think>", "</think>"),
    "think_brackets": Tags("[THINK]", "[/THINK]"),
    "harmony": Tags(harmony.ANALYSIS, harmony.END),
}
"""Tags around models' thinking, by name."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    calls: CallFormat | None = None
    """Format of tool calls; None if it is unknown."""
    reasoning: Tags | None = None
    """Tags around the thinking; None if the model does not think in tags."""
    names_first: bool = False
    """Whether a call in Mistral's format is a name followed by arguments."""
    in_fences: bool = False
    """Whether arguments in DeepSeek's format are in a fenced block, as in V3 and R1."""

    @property
    def reasoning_name(self) -> str | None:
        """The setting's name for the tags; None if there are none."""
        return next((name for name, tags in TAGS.items() if tags == self.reasoning), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers between the parts of an output. In some models they are special tokens."""
        if self.calls is CallFormat.HARMONY:
            return harmony.MARKS
        reader = READERS[self.calls] if self.calls else CallReader
        return (*reader.marks, *reader.behind, *reader.inside, *(self.reasoning or ()))


@dataclass(frozen=True, slots=True)
class FormatConfig:
    """The operator's choice. ``auto`` follows the models' templates; ``none`` disables a format."""

    tool_calls: str = "auto"
    reasoning: str = "auto"

    def of(self, chat_template: str) -> OutputFormat:
        """A model's format from its chat template and these settings."""
        told = format_of(chat_template)
        calls, reasoning = told.calls, told.reasoning
        if self.tool_calls != "auto":
            calls = None if self.tool_calls == "none" else CallFormat(self.tool_calls)
        if self.reasoning != "auto":
            reasoning = None if self.reasoning == "none" else TAGS[self.reasoning]
        return replace(told, calls=calls, reasoning=reasoning)


@lru_cache(maxsize=64)
def format_of(chat_template: str) -> OutputFormat:
    """The format of a template's earlier turns, which it also asks the model to use."""
    calls = next(calls_in(chat_template), None)
    if calls is CallFormat.HARMONY:
        return OutputFormat(calls, TAGS["harmony"])
    all_tags = (tags for name, tags in TAGS.items() if name != "harmony")
    return OutputFormat(
        calls,
        next((tags for tags in all_tags if tags.close in chat_template), None),
        names_first=MistralReader.ARGS in chat_template,
        in_fences=calls is CallFormat.DEEPSEEK and DeepSeekCall.FENCE in chat_template,
    )


def calls_in(template: str) -> Iterator[CallFormat]:
    """The formats of which a template has all markers, most likely first."""
    return (calls for calls, _, signs in _FORMATS if all(sign in template for sign in signs))
