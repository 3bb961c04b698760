"""A job inside the engine, shared by the scheduler, the runner and the loop."""

from typing import Final

from protocol import NO_TOKEN_ID, OnDeadline
from worker.core import Job

PENDING: Final = NO_TOKEN_ID
"""Placeholder in ``Request.tokens`` for the token of a launched step."""


class Request:
    """A job and its progress: it has no prefill or decode phase, only ``computed`` of ``tokens``.

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
        """Prompt plus ``max_tokens``, clipped to the size of the context and the pool; set by the
        scheduler, which knows both."""
        self.seed = own_seed if sampling.seed is None else sampling.seed % 2**64
        """Key of the random draws, 0 … 2**64-1; the client's, or the job's own."""
        self.submitted_at = submitted_at
        self.ends_cleanly = job.on_deadline in (OnDeadline.PARTIAL, OnDeadline.FINISH)
        """Whether the client accepts a partial text at the deadline (DL-6 ``partial``)."""
        self.least_tokens = 0 if self.ends_cleanly else certain
        """Least number of tokens that it still needs to end well (DL-3)."""
        self.end_ids: frozenset[int] = frozenset()
        """Ids of tokens that end its text."""
        self.hashes: list[bytes] = []
        """Hashes of its full blocks: the prompt's from the start, then each as it fills."""
        self.root_hash = b""
        """The parent of the first block's hash."""
        self.computed = 0
        self.slot = -1
        """Row of the runner's tables while running, otherwise -1."""
        self.blocks: list[int] = []
        """Blocks that it holds; the first may be shared, never written; fixed once ``begun``."""
        self.full_blocks = 0
        """Number of full ``blocks``, which have a hash or share their content."""
        self.cached_tokens = 0
        """Number of prompt tokens that were already computed."""
        self.begun = False
        """Whether a step has been planned for it."""
        self.is_looked_up = False
        """Whether its prefix was looked up on disk."""
        self.loading = False
        """Whether blocks of its prefix are being loaded from disk: it is not admitted meanwhile."""
        self.compiling = False
        """Whether its grammar is being compiled: it is not admitted meanwhile."""
        self.leaving = False
        """Whether it gets no further steps; it stays until launched ones are read."""
        self.pausing = False
        """Whether it pauses after the step in flight is read; it gets no step until then."""
        self.paused = False
        """Whether it is paused: it has left its slot but keeps its blocks."""
        self.held_back = False
        """Whether it was paused before it began: it waits and must not be admitted."""
        self.revision = 0
        """Number of its pauses and undone launches: after each, the runner's tables are
        outdated."""
        self.latest_start = 0.0
        """Deadline minus expected service time: the order of the queue (least slack first)."""
        self.backfilled_past = 0
        """Number of smaller requests that went first while this one lacked blocks."""
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.late_tokens = 0
        self.spoilt = False
        """Whether its numbers are not finite: its blocks must not be used."""
        self.step_failed = False
        """Whether one of its steps failed: its blocks may hold anything."""
        self.spared = False
        """Whether it was certain to miss its deadline but continues anyway."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens
