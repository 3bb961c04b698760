"""The formats that a model uses, derived from its chat template unless the operator states them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from orchestrator.parsing import harmony
from orchestrator.parsing.calls import (
    CallReader,
    DeepSeekCall,
    DeepSeekReader,
    GlmReader,
    HermesReader,
    Llama3Reader,
    MiniMaxReader,
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
    MINIMAX_M2 = "minimax_m2"
    DEEPSEEK = "deepseek"
    HARMONY = "harmony"


READERS: Mapping[CallFormat, type[CallReader]] = {
    CallFormat.HERMES: HermesReader,
    CallFormat.LLAMA3: Llama3Reader,
    CallFormat.MISTRAL: MistralReader,
    CallFormat.QWEN3_CODER: QwenCoderReader,
    CallFormat.GLM45: GlmReader,
    CallFormat.MINIMAX_M2: MiniMaxReader,
    CallFormat.DEEPSEEK: DeepSeekReader,
    CallFormat.HARMONY: harmony.HarmonyReader,
}
_CALL_MARKERS: Mapping[CallFormat, tuple[str, ...]] = {
    CallFormat.HERMES: (HermesReader.OPEN, HermesReader.CLOSE),
    CallFormat.LLAMA3: (Llama3Reader.TAG,),
    CallFormat.MISTRAL: (MistralReader.MARK, "[CALL_ID]", MistralReader.ARGS),
    CallFormat.QWEN3_CODER: (HermesReader.OPEN, HermesReader.CLOSE),
    CallFormat.GLM45: (HermesReader.OPEN, HermesReader.CLOSE, *GLM45.key, *GLM45.value),
    CallFormat.MINIMAX_M2: (MiniMaxReader.OPEN, MiniMaxReader.CLOSE),
    CallFormat.DEEPSEEK: (
        *(DeepSeekReader.BEGIN, DeepSeekCall.CALL, DeepSeekCall.SEPARATOR),
        *(DeepSeekReader.CLOSE, DeepSeekReader.END),
    ),
    CallFormat.HARMONY: harmony.MARKS,
}
TAGS: Mapping[str, Tags] = {
    "think": Tags("<think>", "</think>"),
    "think_brackets": Tags("[THINK]", "[/THINK]"),
    "harmony": Tags(harmony.ANALYSIS, harmony.END),
}
"""Tags that models think in, by name."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    calls: CallFormat | None = None
    """Format of tool calls; None if none is known here."""
    reasoning: Tags | None = None
    """Tags that the model thinks in; None if it does not think in tags."""
    names_first: bool = False
    """Whether a call in Mistral's format is a name and then its arguments."""
    in_fences: bool = False
    """Whether arguments in DeepSeek's format stand in a fenced block, as in V3 and R1."""

    @property
    def reasoning_name(self) -> str | None:
        """The tags' name, as in the setting; None without tags."""
        return next((name for name, tags in TAGS.items() if tags == self.reasoning), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that separate the parts of the model's output. Some models have special
        tokens for them, which no text shows."""
        calls = () if self.calls is None else _CALL_MARKERS[self.calls]
        if self.calls is CallFormat.HARMONY:
            return calls
        return (*calls, *(self.reasoning or ()))


@dataclass(frozen=True, slots=True)
class FormatConfig:
    """The operator's choice: ``auto`` follows the models' templates, ``none`` disables it."""

    tool_calls: str = "auto"
    reasoning: str = "auto"

    def of(self, chat_template: str) -> OutputFormat:
        """A model's format, by its chat template and these settings."""
        if self == _AUTO:
            return format_of(chat_template)
        told = format_of(chat_template)
        calls, reasoning = told.calls, told.reasoning
        if self.tool_calls != "auto":
            calls = None if self.tool_calls == "none" else CallFormat(self.tool_calls)
        if self.reasoning != "auto":
            reasoning = None if self.reasoning == "none" else TAGS[self.reasoning]
        return replace(told, calls=calls, reasoning=reasoning)


_AUTO = FormatConfig()


@lru_cache(maxsize=64)
def format_of(chat_template: str) -> OutputFormat:
    """The format in which a template writes earlier turns, and which it asks for."""
    calls = _calls_in(chat_template)
    if calls is CallFormat.HARMONY:
        return OutputFormat(calls, TAGS["harmony"])
    return OutputFormat(
        calls,
        _tags_in(chat_template),
        names_first=MistralReader.ARGS in chat_template,
        in_fences=calls is CallFormat.DEEPSEEK and DeepSeekCall.FENCE in chat_template,
    )


def _calls_in(template: str) -> CallFormat | None:
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return CallFormat.HARMONY
    if DeepSeekReader.BEGIN in template:
        return CallFormat.DEEPSEEK
    if MistralReader.MARK in template:
        return CallFormat.MISTRAL
    if MiniMaxReader.OPEN in template:
        return CallFormat.MINIMAX_M2
    if HermesReader.OPEN in template:
        if QwenCoderReader.FUNCTION in template:
            return CallFormat.QWEN3_CODER
        return CallFormat.GLM45 if GLM45.key[0] in template else CallFormat.HERMES
    if Llama3Reader.TAG in template:
        return CallFormat.LLAMA3
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return CallFormat.LLAMA3
    return None


def _tags_in(template: str) -> Tags | None:
    for name in ("think", "think_brackets"):
        if TAGS[name].close in template:
            return TAGS[name]
    return None
