"""What a model writes, taken apart: however it is cut into pieces, it comes to the same (OR-3)."""

import json
import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.parsing import (
    Call,
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    CallFormat,
    Content,
    Output,
    OutputFormat,
    OutputParser,
    Piece,
    Reasoning,
    collect,
    format_of,
)
from orchestrator.parsing.formats import Tags

THINK = Tags("<think>", "</think>")
TOOLS = frozenset({"get_weather", "add"})
WEATHER = Call("get_weather", '{"city": "Köln"}')
ADD = Call("add", '{"a": 1, "b": [2, "}"]}')


def parse(
    texts: Iterable[str],
    calls: CallFormat | None,
    *,
    tags: Tags | None = None,
    prompt_end: str = "",
    only_one_call: bool = False,
) -> list[Piece]:
    parser = OutputParser(
        OutputFormat(calls, tags),
        tools=TOOLS,
        only_one_call=only_one_call,
        prompt_end=prompt_end,
    )
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return [*pieces, *parser.finish()]


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
HERMES, LLAMA3, MISTRAL = CallFormat


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, H, "", [WEATHER]),
        (HERMES, f"Let me see.\n\n{H}\n{H_ADD}\n", "Let me see.", [WEATHER, ADD]),
        (HERMES, f"{H}\n\nThat is all.", "\n\nThat is all.", [WEATHER]),
        (HERMES, H.removesuffix("\n</tool_call>"), "", [WEATHER]),
        (HERMES, '<tool_call>{"name": "x"}</tool_call>', "", [Call("x", "{}")]),
        (HERMES, '<tool_call>{"name": "x", "arguments": null}', "", [Call("x", "{}")]),
        (
            HERMES,
            '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [Call("x", '{"a": 1}')],
        ),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": "</tool_call>\\""}}', "", 1),
        (LLAMA3, L, "", [WEATHER]),
        (LLAMA3, f"<|python_tag|>{L}; {L_ADD}", "", [WEATHER, ADD]),
        (LLAMA3, f"\n\n{L}\n{L_ADD}", "", [WEATHER, ADD]),
        (MISTRAL, f"[TOOL_CALLS] [{M}, {M_ADD}]", "", [WEATHER, ADD]),
        (MISTRAL, f"So: [TOOL_CALLS]{M}", "So:", [WEATHER]),
        (
            MISTRAL,
            f'[TOOL_CALLS]get_weather{{"city": "Köln"}}[TOOL_CALLS]add[ARGS]{ADD.arguments}',
            "",
            [WEATHER, ADD],
        ),
        (MISTRAL, f"[TOOL_CALLS]add[CALL_ID]a1b2[ARGS]{ADD.arguments}", "", [ADD]),
    ],
)
def test_calls(format: CallFormat, text: str, content: str, calls: list[Call] | int) -> None:
    output = both_ways(text, format)
    assert output.content == content
    if isinstance(calls, int):
        assert len(output.calls) == calls
        assert isinstance(json.loads(output.calls[0].arguments), dict)
    else:
        assert output.calls == calls


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "a < b and <tool_ and <tool_call"),
        (HERMES, "ends in space \n "),
        (HERMES, "<tool_call>get_weather(Köln)</tool_call>"),
        (HERMES, " <tool_call> {}</tool_call>"),
        (HERMES, '<tool_call>{"name": ""}</tool_call>'),
        (HERMES, '<tool_call>{"name": 7}</tool_call>'),
        (HERMES, '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": tru}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "x", "arguments": "text"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": 1'),
        (HERMES, '<tool_call>{"name": "x"'),
        (HERMES, '<tool_call>{"name": "' + "x" * 300 + '"}'),
        (HERMES, "<tool_call>" + "[" * 10_000),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a":' + "[" * 5000 + "]" * 5000 + "}}"),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": "\ud83d"}}'.replace("\ud83d", "\\")),
        (LLAMA3, 'He said {"name": "get_weather", "parameters": {}}'),
        (LLAMA3, '{"name": "Rosa", "parameters": {}}'),
        (LLAMA3, '{"city": "Köln"} is JSON'),
        (LLAMA3, "<|python_tag|>print(1)"),
        (LLAMA3, "<|python_"),
        (MISTRAL, "a [list] of [TOOL_CALLS"),
        (MISTRAL, "[TOOL_CALLS]"),
        (MISTRAL, "[TOOL_CALLS][]"),
        (MISTRAL, "[TOOL_CALLS]no call at all"),
        (MISTRAL, "[TOOL_CALLS]what is this? {}"),
    ],
)
def test_what_is_no_call_is_content(format: CallFormat, text: str) -> None:
    """Exactly as it was written."""
    assert both_ways(text, format) == Output(content=text)


@pytest.mark.parametrize(
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


def test_calls_are_told_as_they_are_written() -> None:
    """The name first, then the arguments bit by bit."""
    pieces = parse([H[:35], H[35:55], H[55:62], H[62:]], HERMES)
    assert pieces[0] == CallBegins(0, "get_weather")
    arguments = [piece.json for piece in pieces if isinstance(piece, CallArguments)]
    assert len(arguments) > 1 and "".join(arguments) == WEATHER.arguments
    assert pieces[-1] == CallEnds(0)


def test_a_call_that_fails_after_it_has_begun() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": }'
    pieces = parse([*broken, "\n", *H], HERMES)
    assert CallFails(0, broken) in pieces and pieces[-1] == CallEnds(1)
    assert parse(broken[:-1], HERMES)[-1] == CallFails(0, broken[:-1], is_cut=True)


def test_only_one_call() -> None:
    output = both_ways(f"a{H}\n{H_ADD} b", HERMES, only_one_call=True)
    assert output == Output("", "a", [WEATHER])


def test_without_tools_a_call_is_text() -> None:
    parser = OutputParser(OutputFormat(HERMES, None))
    assert [*parser.feed(H), *parser.finish("!")] == [Content(H), Content("!")]
    assert parser.calls_made == 0


PARTS = [
    *(H, H_ADD, L, L_ADD, f"[TOOL_CALLS][{M},{M_ADD}]", "[TOOL_CALLS]add[ARGS]{}", "[TOOL_CALLS]"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", ";", "[", "]", "{"),
    *("}", '"', "\\", "\\u00e9", ",", ":", " ", "\n", '{"name": "add"', '"arguments": {', "null"),
    *(
        '{"name":',
        '"add"',
        '"parameters": "{',
        "text",
        "<",
        "</",
        "1.5e3",
        "é",
        "𝄞",
        "\x1f",
        "\u2028",
        " " * 63,
        "\n" * 70,
    ),
]


@given(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.data(),
    st.sampled_from([HERMES, LLAMA3, MISTRAL, None]),
    st.sampled_from([None, THINK]),
    st.booleans(),
)
def test_any_cut_comes_to_the_same(
    text: str, data: st.DataObject, format: CallFormat | None, tags: Tags | None, only_one: bool
) -> None:
    """And nothing is lost but markers, white space around them, and what calls are made of."""
    marks = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    cuts = [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]
    whole = collect(parse([text], format, tags=tags, only_one_call=only_one))
    for way in (cuts, list(text)):
        pieces = parse(way, format, tags=tags, only_one_call=only_one)
        assert collect(pieces) == whole
        check_order(pieces)
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not whole.calls and (tags is None or not text.lstrip().startswith(tags.open)):
        assert whole.content == text


def check_order(pieces: Sequence[Piece]) -> None:
    """Reasoning first; a call begins once, has arguments, ends once, and the next has the next
    index."""
    kinds = "".join(
        {Reasoning: "r", Content: "c", CallBegins: "(", CallArguments: "a", CallEnds: ")"}.get(
            type(piece), "!"
        )
        for piece in pieces
    )
    assert re.fullmatch(r"r*(c|\(a*[)!])*", kinds), kinds
    begun = [piece.index for piece in pieces if isinstance(piece, CallBegins)]
    assert begun == list(range(len(begun)))
    assert all(piece.text for piece in pieces if isinstance(piece, Reasoning | Content))


def test_the_format_is_told_from_the_template() -> None:
    qwen = "{% if tools %}<tools></tools> <tool_call></tool_call>{% endif %}"
    assert format_of(qwen) == OutputFormat(HERMES)
    assert format_of(qwen + "<think>\n\n</think>") == OutputFormat(HERMES, THINK)
    assert format_of(qwen + "<function=example>") == OutputFormat()
    llama = '<|start_header_id|> {"name": function name, "parameters": dictionary}'
    assert format_of(llama) == OutputFormat(LLAMA3)
    assert format_of("[AVAILABLE_TOOLS][TOOL_CALLS]") == OutputFormat(MISTRAL)
    assert format_of("{{ messages }}") == OutputFormat()
    assert format_of(qwen).markers == ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize("format", [*CallFormat, None])
@pytest.mark.parametrize("before", ["", "<think>", "so", H, L, "[TOOL_CALLS]", f"[TOOL_CALLS][{M}"])
@pytest.mark.parametrize("behind", ["", H, L, f"[TOOL_CALLS][{M}]", "</think>so", "</tool_call>"])
def test_endless_space_is_content(format: CallFormat | None, before: str, behind: str) -> None:
    """What is held back is looked at with every token: it does not grow with the answer."""
    text = f"{before}{' ' * 700}{behind}"
    parser = OutputParser(OutputFormat(format, THINK), tools=TOOLS)
    pieces: list[Piece] = []
    told = 0
    for fed, one in enumerate(text, start=1):
        more = parser.feed(one)
        told += sum(len(piece.text) for piece in more if isinstance(piece, Content))
        pieces += more
        if not before and fed <= 700:
            assert fed - told <= 512
    whole = collect(parse([text], format, tags=THINK))
    assert collect([*pieces, *parser.finish()]) == whole


def test_no_head_of_a_call_takes_long() -> None:
    """Spaces that several parts could have are not shared out in every way."""
    text = f"[TOOL_CALLS]add{' ' * 240}!{{" * 400  # took 12 s
    assert collect(parse([text], MISTRAL)).content == text
