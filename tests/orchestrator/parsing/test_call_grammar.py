"""What must be called is called in the model's own format, and read as it was meant (OR-3)."""

import json

import pytest

from orchestrator.parsing import (
    CallFormat,
    OutputFormat,
    OutputParser,
    ToolUse,
    collect,
)
from orchestrator.parsing.call_grammar import forced_calls, strict_calls
from orchestrator.tasks.tools import Tool
from tests.support.fake_worker import tokenizer_json
from worker.protocol import GrammarKind

HERMES, LLAMA3, MISTRAL = CallFormat
SCHEMA = {
    "properties": {"city": {"type": "string", "description": 'see http://x "there"\n'}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("get_weather", "", SCHEMA), Tool("add"))
ONE, OTHER = '{"city": "Köln // Bonn"}', '{"a": {"b": [1, null]}}'


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ALL = [
    (OutputFormat(HERMES), tagged(call("get_weather", ONE), call("add", OTHER)), 2),
    (OutputFormat(LLAMA3), call("get_weather", ONE, "parameters"), 1),
    (
        OutputFormat(MISTRAL),
        f"[TOOL_CALLS][{call('get_weather', ONE)}, {call('add', OTHER)}]",
        2,
    ),
    (
        OutputFormat(MISTRAL, names_first=True),
        f"[TOOL_CALLS]get_weather[ARGS]{ONE}[TOOL_CALLS]add[ARGS]{OTHER}",
        2,
    ),
]


@pytest.mark.parametrize(("format", "text", "calls"), ALL)
def test_forced_calls(format: OutputFormat, text: str, calls: int) -> None:
    """The grammar takes what the parser reads, and nothing else."""
    llguidance = pytest.importorskip("llguidance", reason="the engine of grammars")
    tokenizer = llguidance.LLTokenizer(tokenizer_json().decode())
    use = ToolUse(TOOLS, must_call=True)

    def takes(use: ToolUse, text: str) -> bool:
        grammar = llguidance.LLMatcher.grammar_from_lark(forced_calls(use, format, {}).text)
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.get_error()
        return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())

    assert takes(use, text)
    parser = OutputParser(format, tools=use.names)
    output = collect([*parser.feed(text), *parser.finish()])
    assert not output.content and len(output.calls) == calls
    assert [call.name for call in output.calls] == ["get_weather", "add"][:calls]
    assert [call.arguments for call in output.calls] == [ONE, OTHER][:calls]

    for wrong in ("", f"Well: {text}", text.replace("city", "town"), text[:-1], f"{text} "):
        assert not takes(use, wrong)
    assert takes(ToolUse(TOOLS, must_call=True, only_one_call=True), text) is (calls == 1)
    assert not takes(ToolUse(TOOLS, must_call=True, only="add", only_one_call=True), text)


def test_markers_that_are_special_tokens_are_named_by_id() -> None:
    format = OutputFormat(MISTRAL, names_first=True)
    text = forced_calls(ToolUse(TOOLS), format, {4: "[TOOL_CALLS]", 5: "[ARGS]"}).text
    assert "<[4]>" in text and "<[5]>" in text and "[ARGS]" not in text


def test_what_decides_nothing_is_left_out() -> None:
    """Descriptions may be long, and hold what a grammar must not."""
    schema = {
        "description": "a ::= b",
        "properties": {
            "description": {"type": "string", "title": "x", "enum": ["x", {"title": "kept"}]},
            "title": {"const": {"title": "kept"}},
        },
        "anyOf": [{"description": "x", "required": ["title"]}],
    }
    use = ToolUse((Tool("f", "", schema),))
    (rule,) = [
        line.partition("%json ")[2]
        for line in forced_calls(use, OutputFormat(HERMES), {}).text.split("\n")
        if line.startswith("args_0")
    ]
    left = json.loads(rule)
    left.pop("x-guidance")
    assert left == {
        "type": "object",
        "properties": {
            "description": {"type": "string", "enum": ["x", {"title": "kept"}]},
            "title": {"const": {"title": "kept"}},
        },
        "anyOf": [{"required": ["title"]}],
    }


def test_strict_tools_leave_text_free() -> None:
    strict = (Tool("get_weather", "", SCHEMA, strict=True), Tool("add", "", {"type": "object"}))
    grammar = strict_calls(ToolUse(strict), OutputFormat(HERMES), {})
    assert grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG
    stated = json.loads(grammar.text)
    assert stated["triggers"] == ["<tool_call>"]
    first, second = stated["structures"]
    assert first["schema"]["required"] == ["city"] and second["schema"] == {"type": "object"}
    assert strict_calls(ToolUse(TOOLS), OutputFormat(HERMES), {}) is None
    assert strict_calls(ToolUse(strict), OutputFormat(LLAMA3), {}) is None
