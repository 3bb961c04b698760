"""Compiles grammars to matchers on its own threads, and caches the latest."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from protocol import Grammar, InvalidGrammar
from protocol.grammar_source import library_version, parser_limits, problem, source_of
from worker.grammar.closing import Closing
from worker.grammar.constraint import Constraint
from worker.log import model_log

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT: Final = 64
"""Number of grammars kept. Each caches facts about the vocabulary: almost none, at worst 50 MB."""
_KEPT_BYTES: Final = 2 * 2**20
"""Maximum total text length of the kept grammars: those with long texts tend to cache much."""
_THREADS: Final = 2
"""Number of compiler threads, so that one slow grammar does not block all others."""


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Used by any thread."""

    def __init__(self, tokenizer: "LLTokenizer", vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._words = -(-vocab_size // 32)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "tidegate-grammars")

    def constraint(
        self, grammar: Grammar, begun: Sequence[int] = (), closing: Closing | None = None
    ) -> Constraint:
        """A ``Constraint`` for a job whose ``begun`` tokens were generated elsewhere; ready at once
        if the grammar is cached and ``begun`` is empty. Raises ``InvalidGrammar`` for faults found
        without compiling."""
        grammar.check()
        constraint = Constraint(closing)
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
        if known is not None and not begun:
            constraint.resolve(known.deep_copy())
        else:
            self._threads.submit(self._compile, constraint, grammar, list(begun))
        return constraint

    def close(self) -> None:
        """End the threads; waiting constraints never become ready. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint, grammar: Grammar, begun: list[int]) -> None:
        if constraint.is_dropped:
            return
        try:
            constraint.resolve(self._matcher(grammar, begun))
        except InvalidGrammar as error:
            constraint.resolve(None, str(error))
        except Exception as error:
            # The message is not logged, because it may contain the client's text.
            model_log.error("a grammar failed to compile (%s)", type(error).__name__)
            constraint.resolve(None, "the grammar cannot be compiled")

    def _matcher(self, grammar: Grammar, begun: list[int]) -> "LLMatcher":
        from llguidance import LLMatcher

        with self._lock:
            known = self._kept.get(grammar)
        if known is None:
            known = LLMatcher(
                self._tokenizer, source_of(grammar), log_level=0, limits=parser_limits()
            )
            _require(known)
            first = known.deep_copy()
            # A grammar too costly for one step fails here; the mask's cache serves later steps.
            mask = np.zeros(self._words, np.uint32)
            first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            _require(first)
            self._keep(grammar, known)
        matcher = known.deep_copy()
        if begun and not matcher.consume_tokens(begun):
            raise InvalidGrammar("what was generated already does not match the grammar")
        return matcher

    def _keep(self, grammar: Grammar, matcher: "LLMatcher") -> None:
        with self._lock:
            if grammar in self._kept:
                return
            self._kept[grammar] = matcher
            self._kept_bytes += len(grammar.text)
            while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= len(oldest.text)


def build_compiler(
    tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarCompiler | None:
    """A ``GrammarCompiler``, or None (and a log line) if grammars are impossible here."""
    if not library_version():
        model_log.info("no structured output: llguidance is not installed")
        return None
    if not eos_token_ids:
        model_log.info("no structured output: the model has no end token to end it with")
        return None
    from llguidance import LLTokenizer

    try:
        tokenizer = LLTokenizer(
            tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
    except Exception as error:
        model_log.warning(
            "no structured output: llguidance does not support this tokenizer (%s)", error
        )
        return None
    return GrammarCompiler(tokenizer, vocab_size)


def _require(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise InvalidGrammar(problem(matcher.get_error()))
