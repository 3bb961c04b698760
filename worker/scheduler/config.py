"""Limits that the scheduler has to keep."""

from dataclasses import dataclass
from typing import Final

MAX_STALL_S: Final = 0.05
"""Most seconds by which prompts may lengthen a step that also carries decodes, which is as slow as
texts may get (LB-2); if steps take longer than this anyway, prompts may double one."""
MAX_WAITING: Final = 256
"""Jobs held beyond those that run before new ones are refused: orchestrators send only a few more
than run, so these are others', by the plain contract."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits; the names are those of ``WorkerSettings`` and ``ModelCard``."""

    vocab_size: int
    context_tokens: int
    block_tokens: int
    max_running: int
    max_waiting: int
    max_step_tokens: int
    min_start_budget_s: float
    tile_tokens: int
    """Tokens of a step computed at a time: one token beyond a tile costs as much as a whole one."""
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
