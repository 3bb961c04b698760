"""An adaptive concurrency limit: the number of jobs in flight on one instance.

A worker needs as many jobs as it can run and a few waiting ones, so that a free slot is filled in
the next step and not a round trip later. All other jobs stay in the orchestrator's queue, where
they can be reordered, cancelled or sent elsewhere::

in flight ≤ slots (jobs that fit: rows and KV blocks) + backlog (learned)

The backlog follows the wait of those few jobs in the worker. A wait below one step means that the
slot may have been idle; several steps mean that fewer jobs are enough.
"""

import math
from dataclasses import dataclass
from typing import Final

from orchestrator.prediction.step_model import Load
from protocol import WorkerStats

FIRST_BACKLOG = 2.0
LONG_WAIT_STEPS = 4.0
ROWS_PER_BACKLOG = 16
"""Number of slots per job that may wait in the worker. Jobs that wait there cannot go elsewhere: a
few for many slots, because several become free in a step, and none for few slots."""
_SMOOTHING = 0.1
_GROW, _SHRINK = 0.25, 0.25
_FIRST_OUTPUT_TOKENS = 64.0
LONG_PROMPT_TOKENS = 512
"""Number of prompt tokens that usually fit into one step with decodes."""
UNBOUNDED = 2**31
"""More rows than any worker has: no limit."""


@dataclass(eq=False, slots=True)
class InFlightJob:
    """One job in flight. Token counts are expected ones; KV blocks are for the longest answer."""

    new_tokens: int
    output_tokens: int
    blocks: int
    is_computing_prompt: bool
    """Whether the job has no token yet. The limit that counts the job updates it."""
    is_batch: bool = False
    """Whether the job is batch work, which gives its slot to more urgent work."""
    found_no_slot: bool = False
    """Whether every slot was taken when the job was sent."""


MOST_BACKLOG: Final = 8
"""Maximum number of jobs sent beyond those that can run; the number that is needed is learned."""


class ConcurrencyLimit:
    """One instance's jobs in flight, and their limit. No clock: the limit depends only on inputs.
    It is at least one and at most ``max_running + max_backlog``."""

    def __init__(self, max_backlog: int) -> None:
        self.backlog = min(FIRST_BACKLOG, float(max_backlog))
        self._max_backlog = max_backlog
        self.fitting = 1
        """Number of jobs that can run at once, by the worker's rows and KV blocks."""
        self.best_rows = UNBOUNDED
        """Number of rows that should decode at once (``dispatch.rows``)."""
        self._max_running = 1
        self._step_ms = 0.0
        self._jobs: set[InFlightJob] = set()
        self._paused: set[InFlightJob] = set()
        self.clearing = 0
        """Number of slots that jobs must leave, minus the jobs that have got one meanwhile."""
        self.batch = 0
        """Number of its batch jobs that are not paused."""
        self._prefill_tokens = 0
        """Total prompt tokens of jobs that are computing their prompts."""
        self._long_prompts = 0
        """Number of jobs whose prompts take several steps."""
        self._outputs = 0
        self._mean_output = _FIRST_OUTPUT_TOKENS
        self._mean_blocks = 0.0

    # ── how many ─────────────────────────────────────────────────────────────────────────────

    @property
    def limit(self) -> int:
        """Maximum number of jobs in flight. Batch jobs block no other work."""
        backlog = min(math.floor(self.backlog), self.fitting // ROWS_PER_BACKLOG)
        return min(self.fitting + backlog, self.most_rows + self.batch)

    @property
    def most_rows(self) -> int:
        """Number of jobs that should run at once. A prompt of several steps is not a row yet."""
        return self.best_rows + self._long_prompts

    @property
    def most(self) -> int:
        most_backlog = min(self._max_backlog, self._max_running // ROWS_PER_BACKLOG)
        return self._max_running + most_backlog

    @property
    def slots(self) -> int:
        """Maximum number of jobs to run at once: as many as fit, and at most ``most_rows``."""
        return min(self.fitting, self.most_rows)

    def set_max_running(self, max_running: int) -> None:
        if max_running != self._max_running:
            self._max_running = self.fitting = max(1, max_running)

    def observe(self, stats: WorkerStats) -> None:
        self._step_ms = stats.step_ms
        slots = self._max_running
        if self._mean_blocks >= 1 and stats.kv_blocks_total:
            slots = min(slots, stats.running + int(stats.kv_blocks_free / self._mean_blocks))
        self.fitting = max(1, slots)
        if stats.waiting > self.backlog + 1 and stats.running >= self.fitting:
            self._move_backlog(-_SHRINK)

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────

    def add(self, job: InFlightJob, load: int) -> None:
        """Count a job that is sent to the instance, which has ``load`` others."""
        job.found_no_slot = load >= self.fitting
        self._jobs.add(job)
        self.batch += job.is_batch
        self._computes_prompt(job, 1)
        self._outputs += job.output_tokens
        self._mean_output += _SMOOTHING * (job.output_tokens - self._mean_output)
        first = not self._mean_blocks
        self._mean_blocks += (job.blocks - self._mean_blocks) * (1.0 if first else _SMOOTHING)

    def started(self, job: InFlightJob, wait_ms: float) -> None:
        self.got_slot()
        if not job.found_no_slot or not self._step_ms:
            return
        if wait_ms <= self._step_ms:
            self._move_backlog(_GROW)
        elif wait_ms > LONG_WAIT_STEPS * self._step_ms:
            self._move_backlog(-_SHRINK)

    def prompt_computed(self, job: InFlightJob) -> None:
        if job in self._jobs:
            self._computes_prompt(job, -1)
        job.is_computing_prompt = False

    def _computes_prompt(self, job: InFlightJob, sign: int) -> None:
        """Count a job that starts (1) or stops (-1) computing its prompt."""
        if job.is_computing_prompt:
            self._prefill_tokens += sign * job.new_tokens
            self._long_prompts += sign * (job.new_tokens > LONG_PROMPT_TOKENS)

    @property
    def computes_prompts(self) -> bool:
        """Whether a job still computes its prompt."""
        return self._prefill_tokens > 0

    @property
    def paused(self) -> int:
        return len(self._paused)

    @property
    def paused_blocks(self) -> int:
        return sum(job.blocks for job in self._paused)

    @property
    def blocks(self) -> int:
        return sum(job.blocks for job in self._jobs) + self.paused_blocks

    def pause(self, job: InFlightJob, *, for_another: bool = True) -> None:
        """Count a running job as paused: it leaves its slot and keeps its KV."""
        self.remove(job)
        self._paused.add(job)
        self.clearing += for_another

    def got_slot(self) -> None:
        self.clearing = max(0, self.clearing - 1)

    def resume(self, job: InFlightJob, load: int) -> None:
        """Count a paused job as running again, with ``load`` others."""
        self._paused.discard(job)
        self.add(job, load)

    def remove(self, job: InFlightJob) -> None:
        """Remove a job that the worker has ended or lost. Idempotent."""
        self._paused.discard(job)
        if job in self._jobs:
            self._jobs.remove(job)
            self.batch -= job.is_batch
            self._computes_prompt(job, -1)
            self._outputs -= job.output_tokens

    def outstanding_work(self, jobs: int) -> Load:
        """Remaining work of ``jobs``, ours and others'; others' are assumed to be like ours."""
        running = min(jobs, self.slots)
        waiting = jobs - running
        mean = self._outputs / len(self._jobs) if self._jobs else self._mean_output
        return Load(
            running=running,
            waiting=waiting,
            prefill_tokens=self._prefill_tokens,
            # Running jobs are half done on average.
            decode_tokens=round(mean * (running / 2 + waiting)),
        )

    def _move_backlog(self, by: float) -> None:
        least = min(1.0, float(self._max_backlog))
        self.backlog = min(float(self._max_backlog), max(least, self.backlog + by))

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the sums are those of the jobs."""
        prompts = (job.new_tokens for job in self._jobs if job.is_computing_prompt)
        assert self._prefill_tokens == sum(prompts)
        assert self.batch == sum(job.is_batch for job in self._jobs)
        assert self._outputs == sum(job.output_tokens for job in self._jobs)
        assert 1 <= self.slots <= self.fitting <= self._max_running
        assert 0 <= self.backlog <= self._max_backlog
