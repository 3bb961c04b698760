"""Grammars that cannot be used are refused here, by the library that would have to use them.

What was found of the latest is kept: clients send the same schema again and again.
"""

from collections import OrderedDict
from importlib.util import find_spec

from orchestrator.errors import InvalidRequest
from orchestrator.prompts import Steps
from worker.protocol import Grammar, InvalidGrammar, ModelCard
from worker.protocol.grammar_source import check_source

_HAS_LIBRARY = find_spec("llguidance") is not None
"""It is loaded on the thread that uses it first. Without it a worker finds what is wrong."""
_KEPT = 256
_KEPT_CHARS = 4 * 2**20


class GrammarCheck:
    """Of one process; used by its event loop, while ``in_steps`` is for a thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[Grammar, str] = OrderedDict()
        self._chars = 0

    def needs_thread(self, grammar: Grammar) -> bool:
        return _HAS_LIBRARY and grammar not in self._found

    def require(self, grammar: Grammar, card: ModelCard, ignores_eos: bool) -> None:
        """Raise ``InvalidRequest`` for what is known to be of no use with that model."""
        if not card.grammars:
            raise InvalidRequest(
                f"text of {card.model!r} cannot be made to match a grammar: its workers say that "
                "they have no way to (their logs say why); leave it out",
                field="grammar",
            )
        if ignores_eos:
            raise InvalidRequest(
                "a grammar says where the text ends: it does not go with ignore_eos",
                field="ignore_eos",
            )
        problem = self._found.get(grammar, "")
        if problem:
            self._found.move_to_end(grammar)
            raise InvalidRequest(problem, field="grammar")

    def in_steps(self, grammar: Grammar) -> Steps[str]:
        """What is wrong with it, empty for nothing."""
        yield True
        try:
            check_source(grammar)
        except InvalidGrammar as error:
            return str(error)
        return ""

    def keep(self, grammar: Grammar, problem: str) -> None:
        """What was found."""
        if grammar in self._found:
            return
        self._found[grammar] = problem
        self._chars += len(grammar.text)
        while len(self._found) > _KEPT or self._chars > _KEPT_CHARS:
            oldest, _ = self._found.popitem(last=False)
            self._chars -= len(oldest.text)
