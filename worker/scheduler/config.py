"""Limits of the scheduler."""

from dataclasses import dataclass
from typing import Final

MAX_STALL_S: Final = 0.05
"""Maximum seconds that prompts may add to a step with decodes, which limits the gaps in texts
(LB-2); if steps take longer than this anyway, prompts may double a step."""
MAX_WAITING: Final = 256
"""Maximum number of jobs held in addition to running ones; more are refused. Orchestrators send
only a few more than run: the rest come from other clients of the plain contract."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits; names are the same as in ``WorkerSettings`` and ``ModelCard``."""

    vocab_size: int
    context_tokens: int
    block_tokens: int
    max_running: int
    max_waiting: int
    max_step_tokens: int
    min_start_budget_s: float
    tile_tokens: int
    """Tokens of a step that are computed at a time: a partial tile costs as much as a full one."""
    max_stall_s: float = MAX_STALL_S
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) is less than max_running"
                f" ({self.max_running}): every running job needs one token per step;"
                " raise the former or lower the latter"
            )

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold ``tokens``."""
        return -(-tokens // self.block_tokens)
