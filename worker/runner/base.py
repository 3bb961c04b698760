"""The interface that turns the scheduler's plan into tokens: one call per step.

Implementations: ``torch_runner`` (a model), ``synthetic`` (made-up tokens).
"""

from typing import NamedTuple, Protocol, runtime_checkable

from protocol import StepCosts
from worker.kv_disk.base import KVMemory
from worker.memory import MemoryGuard
from worker.scheduler.plan import Plan, StepResult
from worker.scheduler.request import Request


class Runner(Protocol):
    """Computes steps, on the engine's thread only."""

    def execute(self, plan: Plan) -> StepResult:
        """Compute one step; a sampling row yields 1 to ``limit_tokens - len(tokens)`` tokens.

        Returns or raises only once the device no longer touches the rows' blocks: the caller may
        free them at once (WP-4). Raises ``DeviceLost`` if no step can succeed any more.
        """

    def close(self) -> None:
        """Release the memory. Idempotent."""


class LaunchedStep(Protocol):
    """A step that was launched on the device and may still be running."""

    def collect(self) -> StepResult:
        """Wait for the step and return its result. Call it once per step, in launch order.

        When this returns, the device no longer touches the blocks of the step's rows, unless a
        later step has the same rows. When it raises, no launched step is still running.
        """


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner that can launch a step before the previous one is read.

    A sampling row yields exactly one token, which also stays on the device: in the next plan, a row
    may start at a token that is ``PENDING`` in ``request.tokens``.
    """

    def launch(self, plan: Plan) -> LaunchedStep:
        """Launch a step. If this raises, no launched step is still running; earlier ones can still
        be collected."""


class StepInFlight:
    """The engine's record of a launched step. ``launch_s``: host seconds of the launch."""

    def __init__(self, plan: Plan, step: LaunchedStep, launch_s: float) -> None:
        self.plan = plan
        self.launch_s = launch_s
        self.requests: frozenset[Request] = frozenset(row.request for row in plan.rows)
        self._step = step

    def collect(self) -> StepResult:
        """Wait for the step; see ``LaunchedStep``. Also raises if the result has the wrong size."""
        result = self._step.collect()
        if len(result.ids) != len(self.plan.rows):
            raise RuntimeError(f"{len(result.ids)} results for {len(self.plan.rows)} rows")
        return result


class BuiltRunner(NamedTuple):
    """A runner, the number of KV blocks that fit in its memory, its device, dtype and attention.

    ``arithmetic`` names everything else that affects the rounding of its sums.
    """

    runner: Runner
    blocks: int
    device: str
    dtype: str
    attention: str = "none"
    arithmetic: str = ""
    memory: KVMemory | None = None
    """How to copy KV blocks; None without KV."""
    guard: MemoryGuard | None = None
    tile_tokens: int = 1
    """See ``SchedulerConfig``."""
    step_costs: StepCosts | None = None
    """Its step times, if they are known without a measurement."""
