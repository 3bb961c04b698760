"""Orders requests: least slack first, and prompts by urgency."""

import math
from collections.abc import Sequence

from worker.scheduler.config import SchedulerConfig
from worker.scheduler.request import Request
from worker.scheduler.step_time import StepTime

_PATIENCE_S = 300.0
"""Seconds after submission at which a request without a deadline is due: it must not starve."""


def expected_left(request: Request, step_time: StepTime) -> float:
    """Expected remaining tokens of a request: from its own hint, or else the usual number."""
    made = request.generated
    expected = float(request.job.expected_tokens)
    if expected and made:
        expected = max(expected - made, 1.0)
    likely = expected or step_time.typical_tokens
    return max(request.least_tokens, min(likely, request.limit_tokens - len(request.tokens)))


def latest_start(request: Request, step_time: StepTime) -> float:
    """Deadline minus expected service time: orders by least slack at any time. Before the first
    token its deadline minus the rest of the prompt counts too."""
    job = request.job
    deadline = min(job.deadline, job.due_by)
    if deadline == math.inf:
        deadline = request.submitted_at + _PATIENCE_S
    prompt_due = deadline - expected_left(request, step_time) * step_time.step_s
    if not request.generated:
        prompt_due = min(prompt_due, job.first_token_by)
    return prompt_due - step_time.prefill_s(len(request.tokens) - request.computed)


def least_slack_first(requests: Sequence[Request], step_time: StepTime) -> list[Request]:
    return sorted(requests, key=lambda one: (latest_start(one, step_time), one.submitted_at))


def most_urgent_first(
    prefilling: Sequence[Request], step_time: StepTime, now: float
) -> list[Request]:
    """Order prompts by urgency; if ``now`` is -inf there is time for all: least slack first.

    Urgency is the log apparent tardiness cost (Vepsalainen, Morton 1987). With a short backlog of
    prompts this is least slack first, with a long one shortest work first: under overload one long
    prompt must not make several short ones late.
    """
    token_s = step_time.prompt_token_s
    if now == -math.inf or not token_s:
        return least_slack_first(prefilling, step_time)
    work_s = {one: token_s * (len(one.tokens) - one.computed) for one in prefilling}
    backlog_s = sum(work_s.values())

    def urgency(request: Request) -> float:
        slack_s = latest_start(request, step_time) - now
        return -max(0.0, slack_s) / backlog_s - math.log(work_s[request])

    return sorted(prefilling, key=urgency, reverse=True)


def not_delaying(
    head: Request,
    others: Sequence[Request],
    holders: Sequence[Request],
    free_blocks: int,
    config: SchedulerConfig,
) -> list[Request]:
    """The ``others`` that do not delay ``head``: it gets its blocks as early as without them.

    ``holders`` have blocks and end at the latest with their last token, so the step at which enough
    of them have ended is known. Paused ones count as if they resumed now: ``head`` cannot get their
    blocks sooner.
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
    """Number of steps until a request's last possible token, if every step computes it."""
    left = len(request.tokens) - request.computed
    chunks = -(-left // config.max_step_tokens)
    return chunks + request.limit_tokens - len(request.tokens) - 1
