"""What must be called is called in the model's own format, and read as it was meant (OR-3)."""

import json
from dataclasses import replace

import pytest

from orchestrator.parsing.call_grammar import calls_or_json, forced_calls, strict_calls
from orchestrator.parsing.formats import TAGS, CallFormat, OutputFormat
from orchestrator.parsing.parser import Output, OutputParser, ToolUse, collect
from orchestrator.parsing.rules import Rules
from orchestrator.tasks.job import Tool
from protocol import Grammar, GrammarKind, InvalidGrammar
from protocol.grammar_source import source_of
from tests.support.cases import for_each
from tests.support.fake_worker import tokenizer_json

HERMES, LLAMA3, MISTRAL, QWEN3_CODER, GLM45, DEEPSEEK, HARMONY, *NEWER = CallFormat
KIMI_K2, GEMMA4, GRANITE = NEWER
THINK = TAGS["think"]
SCHEMA = {
    "properties": {"city": {"type": "string", "description": 'see http://x "there"\n'}},
    "required": ["city"],
}
TOOLS = (Tool("get_weather", "", SCHEMA), Tool("add"))
ONE, OTHER = '{"city": "Köln // Bonn"}', '{"a": {"b": [1, null]}}'
PLAIN = '{"a": "1 < 2"}'


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def qwen(name: str, **arguments: str) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<function={name}>\n{values}</function>"


def glm(name: str, **arguments: str) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


D_ONE, D_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
D_BEGIN, D_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
D_ALL = [(name, args) for name, args in (("get_weather", ONE), ("add", OTHER))]
ALL = [
    (OutputFormat(HERMES), tagged(call("get_weather", ONE), call("add", OTHER)), [ONE, OTHER]),
    (OutputFormat(LLAMA3), call("get_weather", ONE, "parameters"), [ONE]),
    (
        OutputFormat(MISTRAL),
        f"[TOOL_CALLS][{call('get_weather', ONE)}, {call('add', OTHER)}]",
        [ONE, OTHER],
    ),
    (
        OutputFormat(MISTRAL, names_first=True),
        f"[TOOL_CALLS]get_weather[ARGS]{ONE}[TOOL_CALLS]add[ARGS]{OTHER}",
        [ONE, OTHER],
    ),
    (
        OutputFormat(QWEN3_CODER),
        tagged(qwen("get_weather", city="Köln // Bonn"), qwen("add", a="1 < 2")),
        [ONE, PLAIN],
    ),
    (
        OutputFormat(GLM45),
        f"{glm('get_weather', city='Köln // Bonn')}\n{glm('add', a='1 < 2')}",
        [ONE, PLAIN],
    ),
    (
        OutputFormat(DEEPSEEK),
        D_BEGIN
        + "".join(f"{D_ONE}{name}<｜tool▁sep｜>{args}{D_CLOSE}" for name, args in D_ALL)
        + D_END,
        [ONE, OTHER],
    ),
    (
        OutputFormat(DEEPSEEK, in_fences=True),
        D_BEGIN
        + "\n".join(
            f"{D_ONE}function<｜tool▁sep｜>{name}\n```json\n{args}\n```{D_CLOSE}"
            for name, args in D_ALL
        )
        + D_END,
        [ONE, OTHER],
    ),
    (
        OutputFormat(KIMI_K2),
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{args}"
            "<|tool_call_end|>"
            for at, (name, args) in enumerate(D_ALL)
        )
        + "<|tool_calls_section_end|>",
        [ONE, OTHER],
    ),
    (
        OutputFormat(GRANITE),
        f"<|tool_call|>[{call('get_weather', ONE)}, {call('add', OTHER)}]",
        [ONE, OTHER],
    ),
    (
        OutputFormat(HARMONY),
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ONE,
        [ONE],
    ),
]


def takes(text: str, use: ToolUse, format: OutputFormat, **options: bool) -> bool:
    is_thinking = options.pop("is_thinking", False)
    special = {5: "<|end|>"}  # of this tokenizer's, the only one that a format has too
    forced = forced_calls(use, format, Rules(special, **options))
    rules = forced.begun if is_thinking else forced.usual
    assert rules is not None
    return matches(text, rules)


def matches(text: str, rules: Grammar) -> bool:
    llguidance = pytest.importorskip("llguidance", reason="the engine of grammars")
    tokenizer = llguidance.LLTokenizer(tokenizer_json().decode())
    matcher = llguidance.LLMatcher(tokenizer, source_of(rules), log_level=0)
    assert not matcher.get_error()
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def read(
    text: str, format: OutputFormat, use: ToolUse | None = None, prompt_end: str = ""
) -> Output:
    parser = OutputParser(format, tools=use and use.schemas, prompt_end=prompt_end)
    return collect([*parser.feed(text), *parser.finish()])


@for_each(("format", "text", "arguments"), ALL)
def test_forced_calls(format: OutputFormat, text: str, arguments: list[str]) -> None:
    """The grammar takes what the parser reads, and nothing else."""
    use = ToolUse(TOOLS, must_call=True)
    assert takes(text, use, format)
    output = read(text, format, use)
    assert not output.content
    assert [call.name for call in output.calls] == ["get_weather", "add"][: len(arguments)]
    assert [call.arguments for call in output.calls] == arguments

    for wrong in ("", f"Well: {text}", text.replace("city", "town"), text[:-1], f"{text} "):
        assert not takes(wrong, use, format)
    one = ToolUse(TOOLS, must_call=True, only_one_call=True)
    assert takes(text, one, format) is (len(arguments) == 1)
    assert not takes(text, ToolUse(TOOLS, must_call=True, only="add", only_one_call=True), format)


@for_each(("format", "text", "arguments"), ALL)
def test_calls_or_the_form_of_the_answer(
    format: OutputFormat, text: str, arguments: list[str]
) -> None:
    """Where the model may call, a form of the answer must not keep it from that."""
    schema = {
        "type": "object",
        "title": "::=",
        "properties": {"colour": {"enum": ["red"]}, "x": {"pattern": "(?!x)y"}},
        "required": ["colour"],
    }
    asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), lenient=True)
    grammar = calls_or_json(asked, ToolUse(TOOLS), format, Rules({5: "<|end|>"}))
    if format.calls in (LLAMA3, HARMONY):
        assert grammar is None
        return
    assert grammar is not None
    for right in (text, '{"colour":"red"}'):
        assert matches(right, grammar)
    for wrong in ("", "Well", '{"colour":"blue"}', '{"colour":"red","y":1}', text[:-1]):
        assert not matches(wrong, grammar)
    grammar = calls_or_json(
        Grammar(GrammarKind.JSON_OBJECT), ToolUse(TOOLS), format, Rules({5: "<|end|>"})
    )
    assert grammar is not None and matches('{"any":[1]}', grammar)


@for_each("text", ["{", "1", '{"multipleOf": 1}}'])
def test_a_form_that_is_no_schema_is_refused(text: str) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, text)
    with pytest.raises(InvalidGrammar):
        calls_or_json(grammar, ToolUse(TOOLS), OutputFormat(HERMES), Rules({}))


@for_each(("format", "text", "arguments"), ALL)
def test_a_model_may_think_before_it_calls(
    format: OutputFormat, text: str, arguments: list[str]
) -> None:
    """Where the prompt has begun it, it must end it; else it may."""
    use = ToolUse(TOOLS, must_call=True)
    if format.calls is HARMONY:
        format = replace(format, reasoning=TAGS["harmony"])
        thought = f"<|channel|>analysis<|message|>Hm <|end|><|start|>assistant{text}"
    else:
        format = replace(format, reasoning=THINK)
        thought = f"<think>\nHm </thin>\n</think>\n\n{text}"
        begun = thought.removeprefix("<think>\n")
        assert takes(begun, use, format, is_thinking=True)
        assert not takes(text, use, format, is_thinking=True)
        assert read(begun, format, use, "<think>").reasoning == "Hm </thin>"
    assert takes(text, use, format) and takes(thought, use, format)
    assert not takes(thought[:-5], use, format)
    output = read(thought, format, use)
    assert output.reasoning.startswith("Hm ") and not output.content
    assert [call.arguments for call in output.calls] == arguments


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    more = '{"city": "Köln", "town": "Bonn"}'
    text, format = tagged(call("get_weather", more)), OutputFormat(HERMES)
    said = (Tool("get_weather", "", {**SCHEMA, "additionalProperties": True}),)
    assert not takes(text, ToolUse(TOOLS), format)
    assert takes(text, ToolUse(said), format)


@for_each("format", [QWEN3_CODER, GLM45])
def test_values_in_tags(format: CallFormat) -> None:
    """JSON but for strings, which are any text or one of the words that there are."""
    schema = {
        "$defs": {"Point": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        "properties": {
            "n": {"type": "integer"},
            "at": {"type": "object", "$ref": "#/$defs/Point"},
            "unit": {"enum": ["°C", "°F"]},
            "note": {"type": ["string", "null"], "maxLength": 3},
        },
        "required": ["n"],
    }
    use = ToolUse((Tool("f", "", schema),), only_one_call=True)

    def taken(**arguments: str) -> bool:
        text = glm("f", **arguments) if format is GLM45 else tagged(qwen("f", **arguments))
        fits = takes(text, use, OutputFormat(format))
        if fits:
            (made,) = read(text, OutputFormat(format), use).calls
            assert set(json.loads(made.arguments)) == set(arguments)
        return fits

    assert taken(n="1") and taken(n="1", at='{"x": 2}', unit="°C", note="any\ntext")
    for wrong in ({}, {"n": "x"}, {"n": "1", "at": "{}"}, {"n": "1", "unit": "K"}, {"m": "1"}):
        assert not taken(**wrong)
    strict = ToolUse((Tool("f", "", schema, strict=True),))
    with pytest.raises(InvalidGrammar, match="maxLength of 'note'"):
        forced_calls(strict, OutputFormat(format), Rules({}))


def test_markers_that_are_special_tokens_are_named_by_id() -> None:
    format = OutputFormat(MISTRAL, names_first=True)
    rules = Rules({4: "[TOOL_CALLS]", 5: "[ARGS]"})
    text = forced_calls(ToolUse(TOOLS), format, rules).usual.text
    assert "<[4]>" in text and "<[5]>" in text and "[ARGS]" not in text


def test_strict_tools_leave_text_free() -> None:
    strict = (Tool("get_weather", "", SCHEMA, strict=True), Tool("add", "", {"type": "object"}))
    grammar = strict_calls(ToolUse(strict), OutputFormat(HERMES), Rules({}))
    assert grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG
    stated = json.loads(grammar.text)
    assert stated["triggers"] == ["<tool_call>"]
    first, second = stated["structures"]
    assert first["schema"]["required"] == ["city"] and second["schema"] == {"type": "object"}
    assert strict_calls(ToolUse(TOOLS), OutputFormat(HERMES), Rules({})) is None
    assert strict_calls(ToolUse(strict), OutputFormat(LLAMA3), Rules({})) is None


def test_a_format_whose_calls_cannot_be_forced() -> None:
    format = GEMMA4
    use = ToolUse(TOOLS, must_call=True)
    with pytest.raises(InvalidGrammar, match="auto or none"):
        forced_calls(use, OutputFormat(format), Rules({}))
    answer = Grammar(GrammarKind.JSON_OBJECT)
    assert calls_or_json(answer, use, OutputFormat(format), Rules({})) is None
