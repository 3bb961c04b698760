"""A loaded model, whatever engine runs it: what every builder of ``worker.engines`` returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protocol import ModelCard
from worker.core import Clock, EngineService
from worker.grammar.compiler import GrammarCompiler
from worker.settings import WorkerSettings
from worker.text import Tokenizer

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
