"""An answer matches its grammar behind the model's thinking, on the library's real grammars."""

from dataclasses import replace

import pytest

from orchestrator.parsing.formats import TAGS, CallFormat, OutputFormat
from orchestrator.parsing.rules import Rules, behind_thinking
from protocol import Grammar, GrammarKind
from protocol.grammar_source import check_source, source_of
from tests.orchestrator.parsing.test_call_grammar import matches, read
from tests.support.cases import for_each
from tests.support.fake_worker import tokenizer_json

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", '
    '"format": "color"}}, "required": ["a"]}'
)
KINDS = [
    (Grammar(GrammarKind.JSON_SCHEMA, SCHEMA, lenient=True), '{"a":1,"b":"</think>"}', '{"a":"x"}'),
    (Grammar(GrammarKind.JSON_OBJECT), '{"c":[1,2]}', "[1]"),
    (Grammar(GrammarKind.REGEX, "[a-z<]+"), "abc", "A"),
    (Grammar(GrammarKind.CHOICE, '["yes", "no"]'), "yes", "yess"),
    (Grammar(GrammarKind.LARK, 'start: before thought\nbefore: "a"\nthought: "b"'), "ab", "ba"),
    (Grammar(GrammarKind.LARK, 'root ::= "a" root | "b"'), "aab", "aa"),
]
"""Grammars with a text that matches and one that does not."""
PLAIN, QWEN = OutputFormat(reasoning=TAGS["think"]), OutputFormat(CallFormat.HERMES, TAGS["think"])
MISTRAL = OutputFormat(CallFormat.MISTRAL, TAGS["think_brackets"])
HARMONY = OutputFormat(CallFormat.HARMONY, TAGS["harmony"])
SPECIAL = {5: "<|end|>"}
"""The only special token of the fake model's tokenizer that a format has too."""
FINAL = "<|channel|>final<|message|>"


def takes(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    return matches(text, grammar)


@for_each(
    ("format", "grammar", "right", "wrong"),
    [*((PLAIN, *kind) for kind in KINDS), (QWEN, *KINDS[0]), (MISTRAL, *KINDS[0])],
)
def test_the_answer_matches_behind_the_thinking(
    format: OutputFormat, grammar: Grammar, right: str, wrong: str
) -> None:
    """Which the prompt has not begun, has begun, or has ended."""
    assert format.reasoning is not None
    open, close = format.reasoning
    usual, begun, over = behind_thinking(grammar, format, Rules({}))
    for thought in (f"\nHm {{1}}</thin\n{close}\n\n", f"{close}", f"Hm.{close}\n"):
        assert takes(usual, f"{open}{thought}{right}") and takes(begun, f"{thought}{right}")
        assert not takes(over, f"{open}{thought}{right}")
        for grammar_, text in ((usual, f"{open}{thought}"), (begun, thought)):
            assert not takes(grammar_, text) and not takes(grammar_, f"{text}{wrong}")
        output = read(f"{thought}{right}", format, prompt_end=f"<|assistant|>{open}\n")
        assert output.content == right
        assert output == read(f"{open}{thought}{right}", format)
    assert takes(usual, right) and takes(over, right)
    assert not takes(begun, right)
    assert not takes(usual, wrong) and not takes(over, wrong)
    assert over == grammar, "the grammar as it was stated"


@for_each(("grammar", "right", "wrong"), KINDS)
def test_gpt_oss_answers_in_its_final_channel(grammar: Grammar, right: str, wrong: str) -> None:
    usual, begun, _ = behind_thinking(grammar, HARMONY, Rules(SPECIAL))
    assert begun is None
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text in (f"{FINAL}{right}", f"{thought}{FINAL}{right}"):
        assert takes(usual, text)
        assert read(text, HARMONY).content == right
    for text in (right, f"{thought}{right}", f"{thought}{FINAL}{wrong}", f"{thought}{FINAL}"):
        assert not takes(usual, text)


def test_tags_that_are_special_tokens_are_named_by_id() -> None:
    rules = Rules({4: "[THINK]", 5: "[/THINK]"})
    grammar = Grammar(GrammarKind.CHOICE, '["yes"]')
    usual = behind_thinking(grammar, MISTRAL, rules).usual
    assert "<[4]>" in usual.before and "<[5]>" in usual.before and "THINK" not in usual.before
    tags = TAGS["think_brackets"]._replace(close="<|end|>")
    usual, begun, _ = behind_thinking(grammar, replace(MISTRAL, reasoning=tags), Rules(SPECIAL))
    llguidance = pytest.importorskip("llguidance", reason="the engine of grammars")
    tokenizer = llguidance.LLTokenizer(tokenizer_json().decode())
    spelled = [token for char in "<|end|>" for token in tokenizer.tokenize_str(char)]
    for one, thought in ((usual, "[THINK]Hm."), (begun, "Hm.")):
        assert one is not None
        for ids, fits in (([5], True), (spelled, False)):
            matcher = llguidance.LLMatcher(tokenizer, source_of(one), log_level=0)
            said = [*tokenizer.tokenize_str(thought), *ids, *tokenizer.tokenize_str("yes")]
            assert (matcher.consume_tokens(said) and matcher.is_accepting()) is fits


def test_a_model_without_tags_answers_from_the_first_token_on() -> None:
    grammar = KINDS[0][0]
    assert behind_thinking(grammar, OutputFormat(CallFormat.HERMES), Rules({})) == (
        grammar,
        None,
        grammar,
    )


def test_what_is_not_enforced_is_found_behind_the_thinking_too() -> None:
    usual = behind_thinking(KINDS[0][0], PLAIN, Rules({})).usual
    assert check_source(usual) == check_source(KINDS[0][0]) == ["format=color"]
