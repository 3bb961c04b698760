"""What the scheduler has to keep to."""

from dataclasses import dataclass
from typing import Final

MAX_PAUSES: Final = 4
_TOKENS_PER_PAUSE: Final = 16


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
    max_stall_s: float = 0.05
    tile_tokens: int = 1
    """A step's tokens are computed so many at a time: one more costs a whole tile of them."""
    prefix_cache: bool = True
    max_pauses: int = MAX_PAUSES
    """How often one request may be paused (``most_pauses``); 0: never."""
    session_share: float = 0.5
    """At most so much of the pool is kept for conversations between two turns."""

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) is less than max_running"
                f" ({self.max_running}): every running job needs one token per step;"
                " raise the former or lower the latter"
            )

    @property
    def max_backfills(self) -> int:
        """How often smaller requests may go before one that lacks blocks."""
        return 2 * self.max_running

    def most_pauses(self, generated: int) -> int:
        """How often one with so many tokens may be paused in all; further pauses are ignored."""
        return self.max_pauses + generated // _TOKENS_PER_PAUSE if self.max_pauses else 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)
