"""A loaded model, which builders of ``worker.engines`` return, and the times of its start."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from protocol import ModelCard
from worker.core import Clock, EngineService
from worker.grammar.compiler import GrammarCompiler
from worker.log import model_log
from worker.settings import WorkerSettings
from worker.text import Tokenizer


class LoadTiming:
    """Milliseconds by phase, in the order in which the phases ended. For any thread."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.ms: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the ``with`` block as phase ``name``."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.ms[name] = (time.monotonic() - begun) * 1e3

    def total_ms(self) -> float:
        """Milliseconds since the start."""
        return (time.monotonic() - self._begun) * 1e3


EngineLoader = Callable[[WorkerSettings, Clock], "LoadedEngine"]
"""Loads an engine: ``worker.engines.load_engine``, or a test's function."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is loaded but not started, with everything that its callers need."""

    engine: EngineService
    tokenizer: Tokenizer
    card: ModelCard
    load_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of each startup phase; some overlap; ``total`` covers all of them (LB-6)."""
    grammars: GrammarCompiler | None = None
    """The grammar compiler; None if texts cannot be constrained to a grammar."""

    @classmethod
    def timed(
        cls,
        engine: EngineService,
        tokenizer: Tokenizer,
        card: ModelCard,
        timing: LoadTiming,
        grammars: GrammarCompiler | None,
    ) -> Self:
        """Make a ``LoadedEngine`` with the times in ``timing``, and log them."""
        total_ms = timing.total_ms()
        model_log.info(
            "%s is ready on %s after %.2f s: %s %s, %d KV blocks of %d tokens, context %d;"
            " ms by phase: %s",
            card.model,
            card.device,
            total_ms / 1e3,
            card.engine,
            card.engine_version,
            engine.stats().kv_blocks_total,
            card.block_tokens,
            card.context_tokens,
            ", ".join(f"{name} {ms:.0f}" for name, ms in timing.ms.items()),
        )
        return cls(engine, tokenizer, card, timing.ms | {"total": total_ms}, grammars)
