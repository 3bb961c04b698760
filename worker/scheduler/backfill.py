"""Finds requests that may overtake one that lacks blocks: EASY backfilling (Lifka 1995)."""

from collections.abc import Sequence

from worker.scheduler.config import SchedulerConfig
from worker.scheduler.request import Request


def not_delaying(
    head: Request,
    others: Sequence[Request],
    holders: Sequence[Request],
    free_blocks: int,
    config: SchedulerConfig,
) -> list[Request]:
    """The ``others`` that do not delay ``head``: it can have its blocks as early as without them.

    ``holders`` have blocks and end at the latest with their last token, so the step is known by
    which enough of them have ended. Paused ones count as if they went on now: ``head`` cannot have
    their blocks any sooner.
    """
    missing = config.blocks_for(head.limit_tokens) - free_blocks
    fits_after = 0
    for request in sorted(holders, key=lambda one: _steps_left(one, config)):
        if missing <= 0:
            break
        missing -= len(request.blocks)
        fits_after = _steps_left(request, config)
    spare = -missing
    return [
        request
        for request in others
        if _steps_left(request, config) <= fits_after
        or config.blocks_for(request.limit_tokens) <= spare
    ]


def _steps_left(request: Request, config: SchedulerConfig) -> int:
    """Steps until a request's last possible token, if it computes in every one."""
    left = len(request.tokens) - request.computed
    chunks = -(-left // config.max_step_tokens)
    return chunks + request.limit_tokens - len(request.tokens) - 1
