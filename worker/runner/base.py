"""What stands between the scheduler's plan and the tokens: one call per step.

Implementations: ``torch_runner`` (a model), ``synthetic`` (made-up tokens).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from worker.protocol import TokenLogprob
from worker.scheduler.request import Request


@dataclass(slots=True)
class Row:
    """One request's share of a step: compute ``count`` tokens from position ``start`` on.

    ``samples`` says that the row reaches the request's last token, so that a new one follows.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """One step. The first ``decodes`` rows compute one token each, chunks of prompts follow."""

    rows: list[Row]
    decodes: int
    tokens: int


@dataclass(slots=True)
class StepResult:
    """``ids[i]`` are the new tokens of ``plan.rows[i]``, empty where it does not sample.

    ``logprobs[i]`` is parallel to ``ids[i]``, or None where not asked for; the whole list is
    None when no row asked.
    """

    ids: list[list[int]]
    logprobs: list[list[TokenLogprob] | None] | None = None


class Runner(Protocol):
    """Computes steps, on the engine's thread only."""

    def execute(self, plan: Plan) -> StepResult:
        """Compute one step; a sampling row yields 1 to ``limit_tokens - len(tokens)`` tokens.

        Returns, or raises, only when the device no longer touches the rows' blocks: the caller
        may free them at once (WP-4).
        """

    def close(self) -> None:
        """Release the memory. Idempotent."""


class LaunchedStep(Protocol):
    """A step that the device has been given and may still be at."""

    def collect(self) -> StepResult:
        """Wait for the step and return its result; to be called once, in the order of launching.

        When this returns, the device no longer touches the blocks of the step's rows, unless a
        later step has them too. When it raises, no launched step runs any more.
        """


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner that can be given a step before the one before it has been read.

    A sampling row yields exactly one token, which stays on the device too: in the plan that
    follows, a row may start at a token that is ``PENDING`` in ``request.tokens``.
    """

    @property
    def stream_utilization(self) -> float:
        """Share of the time in which the device was at a step, sampled; 0 until measured (LB-7)."""

    def launch(self, plan: Plan) -> LaunchedStep:
        """Give the device a step. When this raises, no launched step runs any more.

        Those launched before can be collected all the same.
        """
