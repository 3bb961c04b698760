"""Makes the constraint of a job from its request's grammar."""

from collections.abc import Sequence

from worker.errors import InvalidCall
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.constraint import Constraint
from worker.protocol import Grammar, InvalidGrammar, Sampling


class Constraints:
    """Makes constraints for one worker's jobs. Used by any thread."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler

    def of(
        self, grammar: Grammar | None, sampling: Sampling, begun: Sequence[int] = ()
    ) -> Constraint | None:
        """The constraint for ``grammar``, None without one; ``begun`` was generated under it
        already. Raises ``InvalidCall``."""
        if grammar is None:
            return None
        if self._compiler is None:
            raise InvalidCall(
                "this worker cannot make its text match a grammar: its log says why since it loaded"
            )
        try:
            grammar.check_with(sampling)
            return self._compiler.constraint(grammar, begun)
        except InvalidGrammar as error:
            raise InvalidCall(str(error)) from None

    def close(self) -> None:
        """Close the compiler. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()
