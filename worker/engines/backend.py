"""What an engine that others wrote has to do for ``SteppedEngine``, which does all the rest.

A backend batches, computes and samples. Deadlines, aborts, accounts and the order in which jobs
start are not its to know: ``SteppedEngine`` looks at them between two steps, and tells it which
jobs to take up and which to give up.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.core import Job
from worker.protocol import Code, FinishReason, PromptLogprobs, TokenLogprob
from worker.scheduler.end_reason import NOT_FINITE


@dataclass(slots=True)
class Produced:
    """What one step made of one job. ``ids`` holds the end token, where one ended it."""

    handle: int
    ids: Sequence[int] = ()
    logprobs: list[TokenLogprob] | None = None
    """Parallel to ``ids``, where the job asks for them."""
    prompt: PromptLogprobs | None = None
    end: FinishReason | None = None
    """``STOP`` or ``LENGTH`` where the backend's own rules ended it, ``ERROR`` where it failed."""
    code: Code | None = None
    """With ``ERROR``: why, and ``message`` for people."""
    message: str = ""
    cached_tokens: int = 0
    """Prompt tokens that it found computed; with a job's first tokens."""


def not_finite(handle: int) -> Produced:
    """A job's logits were NaN or infinite; it has been given up, and its KV with it."""
    end = NOT_FINITE
    return Produced(handle, end=end.reason, code=end.code, message=end.message)


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """A backend's state between two steps. Blocks are KV blocks of the card's ``block_tokens``."""

    kv_blocks_total: int
    kv_blocks_used: int
    running: int
    waiting: int
    kv_blocks_cached: int = 0
    hit_blocks_total: int = 0
    missed_blocks_total: int = 0
    evicted_blocks_total: int = 0
    prompt_tokens_total: int = 0
    """Computed, not those found in the cache."""


class Backend(Protocol):
    """Everything but ``interrupt`` is called on the engine's thread only, between two steps."""

    def add(self, handle: int, job: Job, max_tokens: int) -> None:
        """Take a job up: at most ``max_tokens`` tokens, prompt and all within the context.

        Raises ``RequestError`` for what it cannot do; the job is not there then.
        """

    def abort(self, handles: Collection[int]) -> None:
        """Give jobs up. Nothing of them is produced from here on; their blocks are free at the
        latest when the next ``step`` returns. Unknown handles are ignored."""

    def step(self, wait_s: float) -> Sequence[Produced]:
        """Let at most one engine step happen, and say what came of it.

        Empty after ``wait_s`` without one. Raises what makes it unusable for good, ``DeviceLost``
        among others.
        """

    def interrupt(self) -> None:
        """Any thread: have a ``step`` that waits return soon, since there is news, or the next one
        if none waits. May do nothing where ``step`` computes by itself."""

    def load(self) -> BackendLoad:
        """How full it is; asked several times a step."""

    def close(self) -> None:
        """Release everything. Idempotent."""
