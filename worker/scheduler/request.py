"""A job inside the engine, as the scheduler, the runner and the loop share it."""

from dataclasses import dataclass, field
from typing import Final

from protocol import OnDeadline
from worker.core import Job

PENDING: Final = -1
"""Placeholder in ``Request.tokens`` for a token that a launched step will give."""


@dataclass(slots=True, eq=False)
class Request:
    """A job with its progress: no prefill or decode phase, only ``computed`` of ``tokens``.

    ::

        tokens    [ prompt ............ | generated ... ]
        computed  ──────────────────▶ KV of these positions is in the pool
        limit_tokens ───────────────────────────────────────────▶ blocks are reserved up to here
    """

    job: Job
    tokens: list[int]
    prompt_tokens: int
    limit_tokens: int
    """Prompt plus ``max_tokens``, clipped to what the context and the pool can hold."""
    seed: int
    """Key of the random draws, 0 … 2**64-1; the client's, or one of the job's own."""
    submitted_at: float
    least_tokens: int
    """Least number of tokens that it must still get before it can end well (DL-3)."""
    ends_cleanly: bool
    """Whether the client accepts a partial text when time runs out (DL-6 ``partial``)."""

    end_ids: frozenset[int] = frozenset()
    """Ids of tokens that end its text."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks: the prompt's from the start, then each as it fills."""
    root_hash: bytes = b""
    """The hash to which the first block's is chained."""

    computed: int = 0
    slot: int = -1
    """Row of the runner's tables while running, else -1."""
    blocks: list[int] = field(default_factory=list)
    """Blocks that it holds; the first may be shared, never written; fixed once ``begun``."""
    full_blocks: int = 0
    """How many of ``blocks`` are full, and so have a hash or share their content."""
    cached_tokens: int = 0
    """Prompt tokens that were found computed already."""
    begun: bool = False
    """Whether a step has been planned for it."""
    is_looked_up: bool = False
    """Whether its head has been looked for on disk."""
    loading: bool = False
    """Whether blocks of its head are being loaded from disk: it is not admitted until then."""
    compiling: bool = False
    """Whether its grammar is being compiled: it is not admitted until then."""
    leaving: bool = False
    """Whether no further step is planned for it; it stays until launched ones have been read."""
    pausing: bool = False
    """Whether it is paused once the step in flight has been read; none is planned until then."""
    paused: bool = False
    """Whether it is paused: it has left its slot, and keeps its blocks."""
    held_back: bool = False
    """Whether it waits, paused before it has begun, and must not be admitted."""
    revision: int = 0
    """How often it was paused, or a launched step of it undone: the runner's tables are of an
    earlier revision then."""
    latest_start: float = 0.0
    """Deadline less expected service: the order of the queue (least slack first)."""
    backfilled_past: int = 0
    """How often a smaller request went first while this one lacked blocks."""
    started_at: float | None = None
    first_token_at: float | None = None
    late_tokens: int = 0
    spoilt: bool = False
    """Whether its numbers are not finite: the content of its blocks must not be used."""
    step_failed: bool = False
    """Whether a step of it failed, which may have left anything in its blocks."""
    spared: bool = False
    """Whether it was certain to miss its deadline, and continues anyway."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def deadline(self) -> float:
        return self.job.deadline


def make_request(job: Job, *, submitted_at: float, own_seed: int) -> Request:
    """A request for ``job``; ``own_seed`` (64 bits) is used if the client gave none.

    ``limit_tokens`` is set by the scheduler, which knows the capacity.
    """
    sampling = job.sampling
    ends_cleanly = job.on_deadline in (OnDeadline.PARTIAL, OnDeadline.FINISH)
    certain = sampling.max_tokens if sampling.length_is_stated else sampling.min_tokens
    return Request(
        job=job,
        tokens=list(job.token_ids),
        prompt_tokens=len(job.token_ids),
        limit_tokens=0,
        seed=own_seed if sampling.seed is None else sampling.seed % 2**64,
        submitted_at=submitted_at,
        least_tokens=0 if ends_cleanly else certain,
        ends_cleanly=ends_cleanly,
    )
