"""What a worker serves: everything that belongs to one model, replaced as one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from worker.core import EngineService, EventSink, Job, JobFinished, StepUnderWay
from worker.loaded import LoadedEngine
from worker.protocol import AbortCause, Code, FinishReason, KvReport, ModelCard, WorkerStats
from worker.service.constraints import Constraints
from worker.settings import WorkerSettings
from worker.text import Tokenizer

MESSAGE_BYTES = 2**20
"""A lane message has at most as many bytes, and these for each token of the context."""
BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Serving:
    """One model. Whoever handles a request takes it once, and keeps to that one."""

    engine: EngineService
    tokenizer: Tokenizer
    card: ModelCard
    constraints: Constraints
    settings: WorkerSettings
    """What it was loaded by."""
    load_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedEngine, settings: WorkerSettings, card: ModelCard) -> "Serving":
        """``card`` is that of ``loaded``, with what only the service knows."""
        constraints = Constraints(loaded.grammars)
        return cls(loaded.engine, loaded.tokenizer, card, constraints, settings, loaded.load_ms)

    @property
    def max_message_bytes(self) -> int:
        return MESSAGE_BYTES + BYTES_PER_TOKEN * self.card.context_tokens


class NoEngine:
    """Stands where an engine was, while the next one loads: hands every job back."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink

    def start(self, sink: EventSink) -> None:
        """It has no thread."""

    def submit(self, job: Job) -> None:
        prompt = len(job.token_ids)
        message = "the worker is loading another model; retry elsewhere"
        reason, code = FinishReason.ERROR, Code.DRAINING
        self._sink(
            [JobFinished(job, reason, code, message, prompt, 0, 0, 0.0, 0.0, 0.0, 0.0, None)]
        )

    def cancel(self, job: Job, cause: AbortCause) -> None:
        """It has no jobs."""

    def pause(self, job: Job) -> None:
        """It has no jobs."""

    def resume(self, job: Job) -> None:
        """It has no jobs."""

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
        """It has no thread."""
