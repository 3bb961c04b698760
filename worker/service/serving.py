"""The model that a worker serves, and everything that is replaced with it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from protocol import (
    AbortCause,
    Code,
    Feature,
    FinishReason,
    Grammar,
    InvalidGrammar,
    KvReport,
    ModelCard,
    Sampling,
    WorkerStats,
)
from worker.core import Clock, EngineService, EventSink, Job, JobFinished
from worker.errors import InvalidCall
from worker.grammar.closing import Closing, ClosingTables
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.constraint import Constraint
from worker.loaded import LoadedEngine
from worker.settings import WorkerSettings
from worker.text import Tokenizer

MESSAGE_BYTES = 2**20
"""Maximum bytes of a lane message, plus ``BYTES_PER_TOKEN`` for each token of the context, plus a
prompt's images."""
BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Serving:
    """One served model. Code that handles a request reads it once and keeps that one."""

    engine: EngineService
    tokenizer: Tokenizer
    card: ModelCard
    settings: WorkerSettings
    """The settings with which it was loaded."""
    grammars: GrammarCompiler | None = None
    closings: ClosingTables | None = None
    """None if texts cannot be brought to a whole end."""
    load_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedEngine, settings: WorkerSettings, card: ModelCard) -> "Serving":
        """Serve ``loaded``; ``card`` is its card plus the fields that only the service knows."""
        pieces, closings = loaded.tokenizer.pieces, None
        if pieces is None or loaded.grammars is None or Feature.GRAMMAR in card.lacks:
            # The tokens' texts are unknown, or the engine takes no masks.
            lacks = tuple(sorted({*card.lacks, Feature.FINISH}))
            card = msgspec.structs.replace(card, lacks=lacks)
        else:
            closings = ClosingTables(pieces.__getitem__, card.vocab_size)
        engine, tokenizer, load_ms = loaded.engine, loaded.tokenizer, loaded.load_ms
        return cls(engine, tokenizer, card, settings, loaded.grammars, closings, load_ms)

    @property
    def max_message_bytes(self) -> int:
        vision = self.card.vision
        images = 0 if vision is None else vision.max_bytes
        return MESSAGE_BYTES + BYTES_PER_TOKEN * self.card.context_tokens + images

    def constraint(
        self,
        grammar: Grammar | None,
        sampling: Sampling,
        begun: Sequence[int] = (),
        *,
        finish_by: float | None = None,
        clock: Clock = time.monotonic,
    ) -> Constraint | None:
        """The constraint for ``grammar``, or None. ``begun`` was already generated under it. A
        match also completes within ``max_tokens``. ``finish_by``, on ``clock``, is when the text
        must end whole. Used by any thread. Raises ``InvalidCall``."""
        if grammar is None and finish_by is None:
            return None
        if finish_by is not None and self.closings is None:
            raise InvalidCall(
                "this worker cannot bring a text to a whole end (on_deadline: finish): its"
                " tokenizer or grammars do not allow it"
            )
        closing = None
        if self.closings is not None and not sampling.ignore_eos:
            deadline = math.inf if finish_by is None else finish_by
            source = "" if grammar is None else grammar.text
            closing = Closing(self.closings, deadline, clock, sampling.max_tokens, source)
        if grammar is None:
            if closing is None:
                return None
            constraint = Constraint(closing)
            constraint.resolve(None)
            return constraint
        if self.grammars is None:
            raise InvalidCall(
                "this worker cannot make its text match a grammar: its log says why since it loaded"
            )
        try:
            grammar.check_with(sampling)
            return self.grammars.constraint(grammar, begun, closing)
        except InvalidGrammar as error:
            raise InvalidCall(str(error)) from None

    def close_grammars(self) -> None:
        """Close the compiler. Idempotent."""
        if self.grammars is not None:
            self.grammars.close()


class EngineAbsent:
    """An ``EngineService`` for the time while the next engine loads. It only returns every job."""

    has_failed = False
    step_under_way = None

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink

    def start(self, sink: EventSink) -> None: ...

    def submit(self, job: Job) -> None:
        prompt = len(job.token_ids)
        message = "the worker is loading another model; retry elsewhere"
        self._sink([JobFinished(job, FinishReason.ERROR, Code.DRAINING, message, prompt)])

    def cancel(self, job: Job, cause: AbortCause) -> None: ...

    def pause(self, job: Job) -> None: ...

    def resume(self, job: Job) -> None: ...

    def stats(self) -> WorkerStats:
        return WorkerStats(*([0] * 10))  # the fields without defaults

    def kv_report(self) -> KvReport | None:
        return None

    def stop(self) -> None: ...
