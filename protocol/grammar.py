"""Structured output: the grammar that a job's text must match, for every dialect."""

from enum import StrEnum
from typing import Final

import msgspec

from protocol.sampling import Sampling

MAX_GRAMMAR_BYTES: Final = 256 * 1024
"""Most bytes of ``Grammar.text`` in UTF-8. Published schemas of whole APIs have less than half."""


class GrammarKind(StrEnum):
    """The language of ``Grammar.text``."""

    JSON_OBJECT = "json_object"
    """Any JSON object; ``text`` is empty."""
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
    """A grammar cannot be used; the message says what is wrong with it."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A grammar that the whole text of an answer must match, from its first generated token on.

    The text can end only where it is complete: its finish reason is then ``stop``. A text that
    ``max_tokens`` or a stop string cuts short is the beginning of one that would match.
    """

    kind: GrammarKind
    text: str = ""
    lenient: bool = False
    """Whether keywords of a schema that cannot be enforced are ignored, not an error."""
    before: str = ""
    """Lark grammar of what comes before the text, such as a model's thinking, from its rule
    ``before``; empty for nothing."""

    def behind(self, before: str) -> "Grammar":
        """Copy this grammar for a text that follows ``before``."""
        return msgspec.structs.replace(self, before=before)

    def check_with(self, sampling: Sampling) -> None:
        """Raise ``InvalidGrammar`` if ``sampling`` contradicts it."""
        if sampling.ignore_eos:
            raise InvalidGrammar("a grammar says where the text ends: ask for it, or ignore_eos")

    def check(self) -> None:
        """Raise ``InvalidGrammar`` for faults that can be found without compiling."""
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
            raise InvalidGrammar("a string in the grammar is not Unicode text") from None
