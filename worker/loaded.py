"""A loaded model, which builders of ``worker.engines`` return, and the times of its start."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from protocol import ModelCard
from worker.core import Clock, EngineService
from worker.grammar.compiler import GrammarCompiler
from worker.settings import WorkerSettings
from worker.text import Tokenizer


class LoadTiming:
    """Milliseconds by phase, in the order in which phases ended. For any thread."""

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

    def __str__(self) -> str:
        return ", ".join(f"{name} {ms:.0f}" for name, ms in self.ms.items())


EngineLoader = Callable[[WorkerSettings, Clock], "LoadedEngine"]
"""Loads an engine: ``worker.engines.load_engine``, or a test's function."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is loaded but not started, and what its callers need to talk to it."""

    engine: EngineService
    tokenizer: Tokenizer
    card: ModelCard
    load_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of each phase of the start; some overlap; ``total`` is all of it (LB-6)."""
    grammars: GrammarCompiler | None = None
    """The compiler for grammars; None where texts cannot be made to match one."""
