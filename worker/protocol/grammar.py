"""Structured output: what the text of a job must be, the same from every dialect."""

from enum import StrEnum
from typing import Final

import msgspec

from worker.protocol.sampling import Sampling

MAX_GRAMMAR_BYTES: Final = 256 * 1024
"""Of ``Grammar.text`` in UTF-8. Published schemas of whole APIs have less than half of that."""


class GrammarKind(StrEnum):
    """What ``Grammar.text`` is written in."""

    JSON_OBJECT = "json_object"
    """Any JSON object; there is no text."""
    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON."""
    REGEX = "regex"
    """A regular expression that the whole text matches: Rust's ``regex`` syntax."""
    CHOICE = "choice"
    """A JSON array of strings, one of which the whole text is."""
    LARK = "lark"
    """A context-free grammar as Lark writes them, in llguidance's variant, from ``start`` on; or,
    with ``::=`` in it, as llama.cpp writes them (GBNF)."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON: ``{"structures": [{"begin", "schema", "end"}, …], "triggers": […]}``. Free text in
    which each of the triggers begins one of the structures (a tool call, for example)."""


class InvalidGrammar(ValueError):
    """A grammar that cannot be used: the message says what is wrong with it."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the whole text of an answer must match, from its first generated token on.

    It can end only where it is complete: the answer's finish reason is then ``stop``. One that
    ``max_tokens`` or a stop string cuts short is the beginning of a text that would match.
    """

    kind: GrammarKind
    text: str = ""
    lenient: bool = False
    """Of a schema, keywords that cannot be enforced are passed over; else they are an error."""
    open_objects: bool = False
    """Of a schema, objects may have properties that it does not name, as JSON Schema has it; else
    only where it says so (``additionalProperties``)."""
    spaced: bool = False
    """JSON may have white space between its tokens; else it has none."""

    def check_with(self, sampling: Sampling) -> None:
        """Raise ``InvalidGrammar`` where ``sampling`` contradicts it."""
        if sampling.ignore_eos:
            raise InvalidGrammar("a grammar says where the text ends: ask for it, or ignore_eos")

    def check(self) -> None:
        """Raise ``InvalidGrammar`` for what no compiler need see."""
        if self.kind is GrammarKind.JSON_OBJECT:
            if self.text:
                raise InvalidGrammar("json_object takes no text; a schema is of kind json_schema")
            return
        if not self.text:
            raise InvalidGrammar(f"a grammar of kind {self.kind} needs its text")
        try:
            # The first comparison spares a megabyte from being encoded to be counted.
            if len(self.text) > MAX_GRAMMAR_BYTES or len(self.text.encode()) > MAX_GRAMMAR_BYTES:
                raise InvalidGrammar(f"a grammar has at most {MAX_GRAMMAR_BYTES} bytes")
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
            raise InvalidGrammar("a string in the grammar is no Unicode text") from None
