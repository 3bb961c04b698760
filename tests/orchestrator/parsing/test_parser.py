"""What a model writes, taken apart: however it is cut into pieces, it comes to the same (OR-3)."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.parsing.formats import CallFormat, OutputFormat, Tags, format_of
from orchestrator.parsing.parser import Output, OutputParser, ParsedCall, collect
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
    Reasoning,
)
from tests.support.cases import for_each

THINK = Tags("<think>", "</think>")
TOOLS = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": ["array", "null"]},
            "unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
        },
        "$defs": {"Unit": {"enum": ["°C", "°F", "1"]}},
    },
    "add": None,
}
WEATHER = ParsedCall("get_weather", '{"city": "Köln"}')
ADD = ParsedCall("add", '{"a": 1, "b": [2, "}"]}')


def parse(
    texts: Iterable[str],
    calls: CallFormat | None,
    *,
    tags: Tags | None = None,
    prompt_end: str = "",
    only_one_call: bool = False,
    forced: str = "",
    is_cut: bool = False,
) -> list[Piece]:
    parser = OutputParser(
        OutputFormat(calls, tags),
        tools=TOOLS,
        only_one_call=only_one_call,
        forced=forced,
        prompt_end=prompt_end,
    )
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return [*pieces, *parser.finish(is_cut=is_cut)]


def both_ways(text: str, calls: CallFormat | None, **options: object) -> Output:
    whole = collect(parse([text], calls, **options))  # type: ignore[arg-type]
    assert collect(parse(text, calls, **options)) == whole  # type: ignore[arg-type]
    return whole


H = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
H_ADD = '<tool_call>\n{"arguments": {"a": 1, "b": [2, "}"]}, "name": "add"}\n</tool_call>'
L = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
L_ADD = '{"type": "function", "name": "add", "parameters": {"a": 1, "b": [2, "}"]}}'
M_ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}, "id": "123456789"}'
M = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
HERMES, LLAMA3, MISTRAL, QWEN3_CODER, GLM45, DEEPSEEK, HARMONY, *NEWER = CallFormat
KIMI_K2, GEMMA4, GRANITE = NEWER
Q = """<tool_call>
<function=get_weather>
<parameter=city>
Köln
</parameter>
</function>
</tool_call>"""
Q_ALL = """<tool_call>
<function=get_weather>
<parameter=city>

a "b" <c>\n\\
</parameter>
<parameter=days>
 3
</parameter>
<parameter=tags>
["x", {"y": null}]
</parameter>
<parameter=unit>
1
</parameter>
<parameter=other>
1
</parameter>
</function>
</tool_call>"""
ALL = ParsedCall(
    "get_weather",
    '{"city": "\\na \\"b\\" <c>\\n\\\\", "days": 3, "tags": ["x", {"y": null}], '
    '"unit": "1", "other": "1"}',
)
G = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
</tool_call>"""
G_ALL = (
    "<tool_call>\nget_weather<arg_key>tags</arg_key><arg_value>None</arg_value>"
    "<arg_key>days</arg_key><arg_value>three</arg_value>"
    "<arg_key>city</arg_key><arg_value>\n</arg_value></tool_call>"
)
D3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Köln"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n'
    '```json\n{"a": 1, "b": [2, "}"]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
D31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Köln"}'
    '<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2, "}"]}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
K = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Köln"}<|tool_call_end|>'
    '<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1, "b": [2, "}"]}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
E = '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>}<tool_call|>'
E_ALL = (
    '<|tool_call>call:add{a:<|"|>"{,}:\\ \n<|"|>,b:[1,-2.5e3,true,null,<|"|><|"|>],c:{d:{},'
    '<|"|>e f<|"|>:False},g:two words}<tool_call|>'
)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
MESSAGE = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Köln"}<|call|>'
)
MESSAGE_ADD = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": [2, "}"]}'
AGAIN = "<|start|>assistant"


@for_each(
    ("format", "text", "content", "calls"),
    [
        (HERMES, H, "", [WEATHER]),
        (HERMES, f"Let me see.\n\n{H}\n{H_ADD}\n", "Let me see.", [WEATHER, ADD]),
        (HERMES, f"{H}\n\nThat is all.", "\n\nThat is all.", [WEATHER]),
        (HERMES, H.removesuffix("\n</tool_call>"), "", [WEATHER]),
        (HERMES, '<tool_call>{"name": "x"}</tool_call>', "", [ParsedCall("x", "{}")]),
        (
            HERMES,
            '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [ParsedCall("x", '{"a": 1}')],
        ),
        (LLAMA3, L, "", [WEATHER]),
        (LLAMA3, f"<|python_tag|>{L}; {L_ADD}", "", [WEATHER, ADD]),
        (MISTRAL, f"[TOOL_CALLS] [{M}, {M_ADD}]", "", [WEATHER, ADD]),
        (MISTRAL, f"So: [TOOL_CALLS]{M}", "So:", [WEATHER]),
        (
            MISTRAL,
            f'[TOOL_CALLS]get_weather{{"city": "Köln"}}[TOOL_CALLS]add[ARGS]{ADD.arguments}',
            "",
            [WEATHER, ADD],
        ),
        (MISTRAL, f"[TOOL_CALLS]add[CALL_ID]a1b2[ARGS]{ADD.arguments}", "", [ADD]),
        (
            LLAMA3,
            f'I {{see}}: {{"a": 1}}\n\n{L}; {L_ADD} So.',
            'I {see}: {"a": 1} So.',
            [WEATHER, ADD],
        ),
        (QWEN3_CODER, f"So:\n{Q}\n{Q_ALL}\n", "So:", [WEATHER, ALL]),
        (QWEN3_CODER, f"{Q.partition(chr(10))[2]} and", " and", [WEATHER]),
        (GLM45, f"So:\n{G}\n{G}", "So:", [WEATHER, WEATHER]),
        (
            GLM45,
            G_ALL,
            "",
            [ParsedCall("get_weather", '{"tags": null, "days": "three", "city": "\\n"}')],
        ),
        (KIMI_K2, f"So: {K}", "So:", [WEATHER, ADD]),
        (KIMI_K2, K.replace("functions.", "").replace(":0", "")[:130], "", [WEATHER]),
        (GEMMA4, f"So: {E}{E}!", "So:!", [WEATHER, WEATHER]),
        (
            GEMMA4,
            E_ALL,
            "",
            [
                ParsedCall(
                    "add",
                    '{"a": "\\"{,}:\\\\ \\n", "b": [1, -2.5e3, true, null, ""], "c": {"d": {}, '
                    '"e f": false}, "g": "two words"}',
                )
            ],
        ),
        (GRANITE, f"<|tool_call|>[{M}, {M_ADD}]", "", [WEATHER, ADD]),
        (DEEPSEEK, f"So:\n\n{D3}", "So:", [WEATHER, ADD]),
        (DEEPSEEK, f"{D31}\n!", "\n!", [WEATHER, ADD]),
        (DEEPSEEK, D31.removeprefix("<｜tool▁calls▁begin｜>")[:-30], "", [WEATHER, ADD]),
        (HARMONY, MESSAGE, "", [WEATHER]),
        (HARMONY, MESSAGE_ADD, "", [ADD]),
        (HARMONY, f"{MESSAGE.partition('{')[0]}<|call|>", "", [ParsedCall("get_weather", "{}")]),
        (
            HARMONY,
            f"<|channel|>commentary<|message|>So:<|end|>{AGAIN}{MESSAGE}{AGAIN}<|channel|>final<|message|>Yes.",
            "So:\n\nYes.",
            [WEATHER],
        ),
    ],
)
def test_calls(format: CallFormat, text: str, content: str, calls: list[ParsedCall]) -> None:
    assert both_ways(text, format) == Output("", content, calls)


@for_each(
    ("format", "text"),
    [
        (HERMES, "a < b and <tool_ and <tool_call"),
        (HERMES, "<tool_call>get_weather(Köln)</tool_call>"),
        (HERMES, '<tool_call>{"name": 7}</tool_call>'),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": tru}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "x", "arguments": "text"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": 1'),
        (HERMES, '<tool_call>{"name": "' + "x" * 300 + '"}'),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a":' + "[" * 5000 + "]" * 5000 + "}}"),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": "\ud83d"}}'.replace("\ud83d", "\\")),
        (LLAMA3, 'He said {"name": "Rosa", "parameters": {}}'),
        (LLAMA3, '{"city": "Köln"} is JSON'),
        (LLAMA3, "<|python_tag|>print(1)"),
        (MISTRAL, "a [list] of [TOOL_CALLS"),
        (MISTRAL, "[TOOL_CALLS][]"),
        (MISTRAL, "[TOOL_CALLS]what is this? {}"),
        (QWEN3_CODER, H),
        (QWEN3_CODER, "<tool_call>\n<function=a b></function>"),
        (QWEN3_CODER, "<function=add><parameter=a>1</function>"),
        (QWEN3_CODER, "<function=add><parameter=" + "a" * 300),
        (GLM45, H),
        (GLM45, "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{}"),
        (KIMI_K2, "<|tool_call_begin|>a b<|tool_call_argument_begin|>{}"),
        (GEMMA4, "<|tool_call>call:add{a:1]"),
        (GEMMA4, "<|tool_call>call:add{a:1,,b:2}<tool_call|>"),
        (GEMMA4, "<|tool_call>call:add{a:" + "[" * 3000),
        (GRANITE, "<|tool_call|>[1]"),
        (HARMONY, '{"city": "Köln"}'),
        (HARMONY, f"{MESSAGE.partition('{')[0]}city"),
        (HARMONY, "to=add " + "a" * 300),
        (HARMONY, "<|channel|> that is a channel"),
    ],
)
def test_what_is_no_call_is_content(format: CallFormat, text: str) -> None:
    """Exactly as it was written."""
    assert both_ways(text, format) == Output(content=text)


@for_each(
    ("text", "prompt_end", "expected"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\nNo.", "", Output("Hm.\n\nYes.", "No.")),
        ("Hm.\n</think>\n\nNo.", "<|assistant|><think>\n", Output("Hm.", "No.")),
        ("Hm. <", "<think>", Output("Hm. <")),
        ("\n", "<think>", Output()),
        ("No <think>.", "<think>\n\n</think>\n\n", Output("", "No <think>.")),
        (" <th", "", Output("", " <th")),
        (f"<think>a</think>{H}", "", Output("a", "", [WEATHER])),
        (f"<think>{H}</think>b", "", Output(H, "b")),
    ],
)
def test_reasoning(text: str, prompt_end: str, expected: Output) -> None:
    assert both_ways(text, HERMES, tags=THINK, prompt_end=prompt_end) == expected


@for_each(
    ("text", "expected"),
    [
        (f"{THOUGHT}{AGAIN}<|channel|>final<|message|>No.<|return|>", Output("Hm.", "No.")),
        (f"{THOUGHT}{AGAIN}{MESSAGE}", Output("Hm.", "", [WEATHER])),
        (f"{THOUGHT}{AGAIN}{THOUGHT}", Output("Hm.\n\nHm.")),
        ("<|channel|>analysis<|message|>Hm. <|", Output("Hm. <|")),
        (f"{THOUGHT}{AGAIN}<|channel|>fin", Output("Hm.")),
        ("<|channel|>commentary to=browser.open<|message|>x", Output("", "x")),
    ],
)
def test_channels(text: str, expected: Output) -> None:
    assert both_ways(text, HARMONY) == expected
    untold = OutputParser(OutputFormat(HARMONY))
    said = collect([*untold.feed(text), *untold.finish()])
    assert said.reasoning == expected.reasoning and not said.calls


@for_each(
    ("format", "text"),
    [
        *((HERMES, H), (QWEN3_CODER, Q), (GLM45, G), (HARMONY, MESSAGE), (GEMMA4, E)),
        (KIMI_K2, K.partition("<|tool_call_end|>")[0]),
    ],
)
def test_calls_are_told_as_they_are_written(format: CallFormat, text: str) -> None:
    """The name first, then the arguments bit by bit."""
    pieces = parse(text, format)
    assert pieces[0] == CallBegins(0, "get_weather")
    arguments = [piece.json for piece in pieces if isinstance(piece, CallArguments)]
    assert len(arguments) > 4 and "".join(arguments) == WEATHER.arguments
    assert pieces[-1] == CallEnds(0)


def test_a_call_that_fails_after_it_has_begun() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": }'
    pieces = parse([*broken, "\n", *H], HERMES)
    assert CallFails(0, broken) in pieces and pieces[-1] == CallEnds(1)
    assert parse(broken[:-1], HERMES)[-1] == CallFails(0, broken[:-1])


@for_each(
    ("format", "text"),
    [
        *((HERMES, H), (LLAMA3, L), (MISTRAL, f"[TOOL_CALLS]{M}"), (QWEN3_CODER, Q)),
        *((GLM45, G), (DEEPSEEK, D31), (HARMONY, MESSAGE), (KIMI_K2, K)),
        *((GEMMA4, E), (GRANITE, f"<|tool_call|>[{M}]")),
    ],
)
def test_a_call_that_a_limit_cuts(format: CallFormat, text: str) -> None:
    """It is a call from its name on; from the first token on where it is the only one there may
    be."""
    for forced in ("", "get_weather"):
        for end in range(text.index("Köln") + 1):
            pieces = parse([text[:end]], format, forced=forced, is_cut=True)
            output = collect(pieces)
            if forced or any(isinstance(piece, CallBegins) for piece in pieces):
                (call,) = output.calls
                assert call.name == "get_weather" and call.is_cut and not output.content
                assert WEATHER.arguments.startswith(call.arguments.rstrip('}"'))
            else:
                assert format is HARMONY or output == Output(content=text[:end])
    thought = "<|channel|>analysis<|message|>Hm" if format is HARMONY else "<think>Hm"
    pieces = parse([thought], format, tags=THINK, forced="get_weather", is_cut=True)
    assert collect(pieces) == Output(reasoning="Hm")


def test_only_one_call() -> None:
    output = both_ways(f"a{H}\n{H_ADD} b", HERMES, only_one_call=True)
    assert output == Output("", "a", [WEATHER])


def test_without_tools_a_call_is_text() -> None:
    parser = OutputParser(OutputFormat(HERMES, None))
    assert [*parser.feed(H), *parser.finish("!")] == [Content(H), Content("!")]
    assert parser.calls_made == 0


WORDS = """<function=add> <parameter=a> </parameter> </function> <function= <tool_call> </tool_call>
<arg_key>a</arg_key> <arg_value> </arg_value> <think> </think> <|python_tag|> <|tool_call|>
<|tool_call_begin|> functions.add:1 <|tool_call_argument_begin|> <|"|> a:1 add
<|tool_call>call:add{ <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> ```json ```
<|channel|> <|message|> <|end|> <|call|> [TOOL_CALLS] ; [ ] { } " \\ \\u00e9 , : null
{"name": "add" text < </ 1.5e3 é"""
PARTS = [
    *(Q, Q_ALL, G, G_ALL, D3, D31, THOUGHT, MESSAGE, MESSAGE_ADD, AGAIN, K, E, E_ALL),
    *(H, H_ADD, L, L_ADD, f"[TOOL_CALLS][{M},{M_ADD}]", "𝄞", "\x1f", "\u2028"),
    *(" " * 63, "\n" * 70, " ", "\n", '"parameters": "{', '{"name": "add"', '"arguments": {'),
    *(" to=functions.add", "[TOOL_CALLS]add[ARGS]{}", *WORDS.split()),
]


@given(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.data(),
    st.sampled_from([*CallFormat, None]),
    st.sampled_from([None, THINK]),
    st.booleans(),
    st.sampled_from(["", "add", None]),
)
def test_any_cut_comes_to_the_same(
    text: str,
    data: st.DataObject,
    format: CallFormat | None,
    tags: Tags | None,
    only_one: bool,
    limit: str | None,
) -> None:
    """And nothing is lost but markers, white space around them, and what calls are made of."""
    marks = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    cuts = [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]
    options: dict[str, Any] = {"tags": tags, "only_one_call": only_one}
    options |= {"forced": limit or "", "is_cut": limit is not None}
    whole = collect(parse([text], format, **options))
    for way in (cuts, list(text)):
        pieces = parse(way, format, **options)
        assert collect(pieces) == whole
        check_order(pieces, is_harmony=format is HARMONY)
    for call in whole.calls:
        assert call.is_cut or isinstance(json.loads(call.arguments), dict)
    is_plain = tags is None or not text.lstrip().startswith(tags.open)
    if not whole.calls and is_plain and format is not HARMONY:
        assert whole.content == text


def check_order(pieces: Sequence[Piece], *, is_harmony: bool) -> None:
    """Reasoning first, but for Harmony's; a call begins once, has arguments, ends once, and the
    next has the next index."""
    kinds = "".join(
        {Reasoning: "r", Content: "c", CallBegins: "(", CallArguments: "a", CallEnds: ")"}.get(
            type(piece), "!"
        )
        for piece in pieces
    )
    pattern = r"([rc]|\(a*[)!])*" if is_harmony else r"r*(c|\(a*[)!])*"
    assert re.fullmatch(pattern, kinds), kinds
    begun = [piece.index for piece in pieces if isinstance(piece, CallBegins)]
    assert begun == list(range(len(begun)))
    assert all(piece.text for piece in pieces if isinstance(piece, Reasoning | Content))


def test_the_format_is_told_from_the_template() -> None:
    qwen = "{% if tools %}<tools></tools> <tool_call></tool_call>{% endif %}"
    assert format_of(qwen) == OutputFormat(HERMES)
    assert format_of(qwen + "<think>\n\n</think>") == OutputFormat(HERMES, THINK)
    assert format_of(qwen + "<function=example>") == OutputFormat(QWEN3_CODER)
    assert format_of(qwen + "<arg_key>{{ k }}</arg_key></think>") == OutputFormat(GLM45, THINK)
    deepseek = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    for signs, calls in (
        ("<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>", KIMI_K2),
        ("<|tool_call>call:", GEMMA4),
        ("respond with <|tool_call|> followed by a list", GRANITE),
    ):
        assert format_of(signs).calls is calls
    assert format_of(deepseek) == OutputFormat(DEEPSEEK)
    assert format_of(f"{deepseek}```json") == OutputFormat(DEEPSEEK, in_fences=True)
    assert format_of("<|channel|>analysis<|message|>").calls is HARMONY
    llama = '<|start_header_id|> {"name": function name, "parameters": dictionary}'
    assert format_of(llama) == OutputFormat(LLAMA3)
    assert format_of("[AVAILABLE_TOOLS][TOOL_CALLS]") == OutputFormat(MISTRAL)
    assert format_of("{{ messages }}") == OutputFormat()
    assert format_of(qwen).markers == ("<tool_call>", "</tool_call>")


@for_each("format", [*CallFormat, None])
@for_each(
    ("before", "behind"),
    [
        *(("", behind) for behind in ("", H, L, f"[TOOL_CALLS][{M}]")),
        *(("<think>", behind) for behind in ("", "</think>so")),
        *(("so", behind) for behind in (H, "</tool_call>")),
        *((before, "") for before in (H, L, "[TOOL_CALLS]", f"[TOOL_CALLS][{M}")),
        *((f"[TOOL_CALLS][{M}", behind) for behind in (H, f"[TOOL_CALLS][{M}]")),
    ],
)
def test_endless_space_is_content(format: CallFormat | None, before: str, behind: str) -> None:
    """What is held back is looked at with every token: it does not grow with the answer."""
    text = f"{before}{' ' * 560}{behind}"
    parser = OutputParser(OutputFormat(format, THINK), tools=TOOLS)
    pieces: list[Piece] = []
    told = 0
    for fed, one in enumerate(text, start=1):
        more = parser.feed(one)
        told += sum(len(piece.text) for piece in more if isinstance(piece, Content))
        pieces += more
        if not before and fed <= 560:
            assert fed - told <= 512
    whole = collect(parse([text], format, tags=THINK))
    assert collect([*pieces, *parser.finish()]) == whole


def test_no_head_of_a_call_takes_long() -> None:
    """Spaces that several parts could have are not shared out in every way."""
    text = f"[TOOL_CALLS]add{' ' * 240}!{{" * 400  # took 12 s
    assert collect(parse([text], MISTRAL)).content == text
