"""Structured output: the grammar that a job's text must match, for every dialect."""

from enum import StrEnum
from typing import Final

import msgspec

from protocol.sampling import Sampling

MAX_GRAMMAR_BYTES: Final = 256 * 1024
"""Maximum UTF-8 bytes of ``Grammar.text``. Published schemas of whole APIs have less than half."""


class GrammarKind(StrEnum):
    """The language of ``Grammar.text``."""

    JSON_OBJECT = "json_object"
    """Any JSON object; ``text`` is empty."""
    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON."""
    REGEX = "regex"
    """A regular expression that the whole text matches: Rust's ``regex`` syntax."""
    CHOICE = "choice"
    """A JSON array of strings; the whole text is one of them."""
    LARK = "lark"
    """A context-free grammar in llguidance's variant of Lark, starting at ``start``; or, if it
    contains ``::=``, in llama.cpp's GBNF."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON: ``{"structures": [{"begin", "schema", "end"}, …], "triggers": […]}``. Free text in
    which each trigger begins one of the structures (for example a tool call)."""


class InvalidGrammar(ValueError):
    """A grammar cannot be used; the message says what is wrong with it."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A grammar that an answer's whole text must match, from its first generated token on.

    The text can end only when it is complete; its finish reason is then ``stop``. If ``max_tokens``
    or a stop string cuts the text, it is the beginning of a matching text.
    """

    kind: GrammarKind
    text: str = ""
    lenient: bool = False
    """Whether schema keywords that cannot be enforced are ignored instead of an error."""
    before: str = ""
    """Lark grammar, starting at its rule ``before``, of the part before the text, such as a model's
    thinking; empty for none."""

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
            # The first comparison avoids encoding a megabyte just to count it.
            if len(self.text) > MAX_GRAMMAR_BYTES or len(self.text.encode()) > MAX_GRAMMAR_BYTES:
                raise InvalidGrammar(f"a grammar has at most {MAX_GRAMMAR_BYTES} bytes")
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
            raise InvalidGrammar("a string in the grammar is not Unicode text") from None
