"""Fields that were appended: neither side needs the other to know them."""

import msgspec
import pytest

from protocol import (
    Grammar,
    GrammarKind,
    InvalidGrammar,
    Sampling,
    Submit,
    TokenLogprob,
    decode_message,
    encode,
)
from protocol.grammar import MAX_GRAMMAR_BYTES
from tests.support.cases import for_each


class _Before(msgspec.Struct, array_like=True, frozen=True):
    logprob: float
    top: list[tuple[int, float]] = []


def test_a_rank_may_be_missing_or_unknown() -> None:
    now, before = TokenLogprob(-1.5, [(3, -0.5)], 9), _Before(-1.5, [(3, -0.5)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(now), type=_Before) == before
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=TokenLogprob)
    assert read == TokenLogprob(-1.5, [(3, -0.5)], 0)


def test_a_grammar_travels_and_costs_nothing_where_there_is_none() -> None:
    plain = Submit("a", 1, [5], Sampling(max_tokens=1), 1000.0)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
    constrained = msgspec.structs.replace(plain, grammar=grammar, begun_tokens=2)
    assert b"before" not in encode(constrained)
    assert b"grammar" not in encode(plain) and b"begun" not in encode(plain)
    assert decode_message(encode(plain)) == plain
    assert decode_message(encode(constrained)) == constrained


@for_each(
    "grammar",
    [
        Grammar(GrammarKind.JSON_OBJECT, "{}"),
        Grammar(GrammarKind.REGEX),
        Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)),
        Grammar(GrammarKind.REGEX, "ä" * (MAX_GRAMMAR_BYTES // 2 + 1)),
        Grammar(GrammarKind.REGEX, "\ud800"),
    ],
)
def test_a_grammar_that_cannot_be_one_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidGrammar):
        grammar.check()
