"""A loaded model, whatever engine runs it: what every builder of ``worker.engines`` returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from worker.core import Clock, EngineService
from worker.grammar.compiler import GrammarCompiler
from worker.protocol import ModelCard
from worker.settings import WorkerSettings
from worker.text import Tokenizer

EngineLoader = Callable[[WorkerSettings, Clock], "LoadedEngine"]
"""``worker.engines.load_engine``, or a test's."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is loaded but not started, and what its callers need to talk to it."""

    engine: EngineService
    tokenizer: Tokenizer
    card: ModelCard
    load_ms: Mapping[str, float] = field(default_factory=dict)
    """How long each phase of the start took, some side by side; ``total`` is all of it (LB-6)."""
    grammars: GrammarCompiler | None = None
    """None where the model's text cannot be made to match one."""
