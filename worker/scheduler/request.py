"""A job inside the engine, as the scheduler, the runner and the loop share it."""

from typing import Final

from protocol import OnDeadline
from worker.core import Job

PENDING: Final = -1
"""Placeholder in ``Request.tokens`` for a token that a launched step will give."""


class Request:
    """A job with its progress: no prefill or decode phase, only ``computed`` of ``tokens``.

    ::

        tokens    [ prompt ............ | generated ... ]
        computed  ──────────────────▶ KV of these positions is in the pool
        limit_tokens ───────────────────────────────────────────▶ blocks are reserved up to here
    """

    def __init__(self, job: Job, *, submitted_at: float, own_seed: int) -> None:
        """``own_seed`` (64 bits) is used if the client gave none."""
        sampling = job.sampling
        certain = sampling.max_tokens if sampling.length_is_stated else sampling.min_tokens
        self.job = job
        self.tokens = list(job.token_ids)
        self.prompt_tokens = len(job.token_ids)
        self.limit_tokens = 0
        """Prompt plus ``max_tokens``, clipped to what the context and the pool can hold; set by the
        scheduler, which knows these."""
        self.seed = own_seed if sampling.seed is None else sampling.seed % 2**64
        """Key of the random draws, 0 … 2**64-1; the client's, or one of the job's own."""
        self.submitted_at = submitted_at
        self.ends_cleanly = job.on_deadline in (OnDeadline.PARTIAL, OnDeadline.FINISH)
        """Whether the client accepts a partial text when time runs out (DL-6 ``partial``)."""
        self.least_tokens = 0 if self.ends_cleanly else certain
        """Least number of tokens that it must still get before it can end well (DL-3)."""
        self.end_ids: frozenset[int] = frozenset()
        """Ids of tokens that end its text."""
        self.hashes: list[bytes] = []
        """Hashes of its full blocks: the prompt's from the start, then each as it fills."""
        self.root_hash = b""
        """The hash to which the first block's is chained."""
        self.computed = 0
        self.slot = -1
        """Row of the runner's tables while running, else -1."""
        self.blocks: list[int] = []
        """Blocks that it holds; the first may be shared, never written; fixed once ``begun``."""
        self.full_blocks = 0
        """How many of ``blocks`` are full, and so have a hash or share their content."""
        self.cached_tokens = 0
        """Prompt tokens that were found computed already."""
        self.begun = False
        """Whether a step has been planned for it."""
        self.is_looked_up = False
        """Whether its head has been looked for on disk."""
        self.loading = False
        """Whether blocks of its head are being loaded from disk: it is not admitted until then."""
        self.compiling = False
        """Whether its grammar is being compiled: it is not admitted until then."""
        self.leaving = False
        """Whether no further step is planned; it stays until launched ones have been read."""
        self.pausing = False
        """Whether it is paused once the step in flight is read; none is planned until then."""
        self.paused = False
        """Whether it is paused: it has left its slot, and keeps its blocks."""
        self.held_back = False
        """Whether it waits, paused before it has begun, and must not be admitted."""
        self.revision = 0
        """How often it was paused, or a launched step of it undone: the runner's tables are of an
        earlier revision then."""
        self.latest_start = 0.0
        """Deadline less expected service: the order of the queue (least slack first)."""
        self.backfilled_past = 0
        """How often a smaller request went first while this one lacked blocks."""
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.late_tokens = 0
        self.spoilt = False
        """Whether its numbers are not finite: the content of its blocks must not be used."""
        self.step_failed = False
        """Whether a step of it failed, which may have left anything in its blocks."""
        self.spared = False
        """Whether it was certain to miss its deadline, and continues anyway."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def deadline(self) -> float:
        return self.job.deadline
