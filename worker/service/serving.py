"""The model that a worker serves, with everything that is replaced together with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from protocol import (
    AbortCause,
    Code,
    Feature,
    FinishReason,
    KvReport,
    ModelCard,
    WorkerStats,
)
from worker.core import EngineService, EventSink, Job, JobFinished, StepUnderWay
from worker.grammar.closing import ClosingTables
from worker.loaded import LoadedEngine
from worker.service.constraints import Constraints
from worker.settings import WorkerSettings
from worker.text import Tokenizer

MESSAGE_BYTES = 2**20
"""Most bytes of a lane message, besides ``BYTES_PER_TOKEN`` for each token of the context, and the
images of a prompt."""
BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Serving:
    """One served model. Code that handles a request reads it once, and keeps to that one."""

    engine: EngineService
    tokenizer: Tokenizer
    card: ModelCard
    constraints: Constraints
    settings: WorkerSettings
    """The settings by which it was loaded."""
    load_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedEngine, settings: WorkerSettings, card: ModelCard) -> "Serving":
        """Serve ``loaded``; ``card`` is its card, completed with what only the service knows."""
        closings = _closings(loaded)
        if closings is None:
            lacks = tuple(sorted({*card.lacks, Feature.FINISH}))
            card = msgspec.structs.replace(card, lacks=lacks)
        constraints = Constraints(loaded.grammars, closings)
        return cls(loaded.engine, loaded.tokenizer, card, constraints, settings, loaded.load_ms)

    @property
    def max_message_bytes(self) -> int:
        vision = self.card.vision
        images = 0 if vision is None else vision.max_bytes
        return MESSAGE_BYTES + BYTES_PER_TOKEN * self.card.context_tokens + images


def _closings(loaded: LoadedEngine) -> ClosingTables | None:
    """Tables by which texts are brought to a whole end; None where the engine takes no masks, or
    nothing is known of what tokens say."""
    pieces = loaded.tokenizer.pieces
    if pieces is None or loaded.grammars is None or Feature.GRAMMAR in loaded.card.lacks:
        return None
    return ClosingTables(pieces.__getitem__, loaded.card.vocab_size)


class NoEngine:
    """An ``EngineService`` for the time while the next engine loads: hands every job back."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink

    def start(self, sink: EventSink) -> None:
        """Do nothing, since there is no thread."""

    def submit(self, job: Job) -> None:
        prompt = len(job.token_ids)
        message = "the worker is loading another model; retry elsewhere"
        reason, code = FinishReason.ERROR, Code.DRAINING
        self._sink(
            [JobFinished(job, reason, code, message, prompt, 0, 0, 0.0, 0.0, 0.0, 0.0, None)]
        )

    def cancel(self, job: Job, cause: AbortCause) -> None:
        """Do nothing, since there are no jobs."""

    def pause(self, job: Job) -> None:
        """Do nothing, since there are no jobs."""

    def resume(self, job: Job) -> None:
        """Do nothing, since there are no jobs."""

    def stats(self) -> WorkerStats:
        return WorkerStats(
            kv_blocks_total=0,
            kv_blocks_used=0,
            kv_blocks_free=0,
            running=0,
            waiting=0,
            step_ms=0.0,
            prefill_tokens_per_s=0.0,
            tokens_total=0,
            late_tokens_total=0,
            jobs_total=0,
            check_us=0.0,
        )

    def kv_reports(self) -> list[KvReport]:
        return []

    @property
    def has_failed(self) -> bool:
        return False

    @property
    def step_under_way(self) -> StepUnderWay | None:
        return None

    def stop(self) -> None:
        """Do nothing, since there is no thread."""
