"""Makes the constraint of a job, from its request's grammar and what is wanted at its deadline."""

import math
import time
from collections.abc import Sequence

from protocol import Grammar, InvalidGrammar, Sampling
from worker.core import Clock
from worker.errors import InvalidCall
from worker.grammar.closing import Closing, ClosingTables
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.constraint import Constraint


class Constraints:
    """Makes constraints for one worker's jobs. Used by any thread."""

    def __init__(
        self, compiler: GrammarCompiler | None, closings: ClosingTables | None = None
    ) -> None:
        """``closings`` is None where texts cannot be brought to a whole end."""
        self._compiler = compiler
        self._closings = closings

    def of(
        self,
        grammar: Grammar | None,
        sampling: Sampling,
        begun: Sequence[int] = (),
        *,
        finish_by: float | None = None,
        clock: Clock = time.monotonic,
    ) -> Constraint | None:
        """The constraint for ``grammar``, None without one; ``begun`` was generated under it
        already, and what matches it is whole within ``max_tokens``, too. ``finish_by``, on
        ``clock``, is when the text must have come to a whole end. Raises ``InvalidCall``."""
        closing = None
        if finish_by is not None and self._closings is None:
            raise InvalidCall(
                "this worker cannot bring a text to a whole end (on_deadline: finish): its"
                " tokenizer or grammars do not allow it"
            )
        is_held = finish_by is not None or grammar is not None
        if is_held and self._closings is not None and not sampling.ignore_eos:
            deadline = math.inf if finish_by is None else finish_by
            closing = Closing(self._closings, deadline, clock, sampling.max_tokens)
        if grammar is None:
            if closing is None:
                return None
            constraint = Constraint(closing)
            constraint.resolve(None)
            return constraint
        if self._compiler is None:
            raise InvalidCall(
                "this worker cannot make its text match a grammar: its log says why since it loaded"
            )
        try:
            grammar.check_with(sampling)
            return self._compiler.constraint(grammar, begun, closing)
        except InvalidGrammar as error:
            raise InvalidCall(str(error)) from None

    def close(self) -> None:
        """Close the compiler. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()
