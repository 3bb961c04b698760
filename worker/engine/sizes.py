"""How many rows and tokens a step carries on CUDA where the operator does not say (WK-13).

A GPU differs from the next one in what a step costs before it does any work. So an engine is built
for the largest sizes, and the smallest ones that lose nothing are taken once steps were measured.
"""

from dataclasses import replace
from typing import Final

from protocol import StepCosts
from worker.scheduler.config import SchedulerConfig
from worker.settings import WorkerSettings

MOST_ROWS: Final = 256
"""With 128 rows in place of 64 first come, first served met 77.5 instead of 68.7 % of conversations
on an engine with an H100's step times, simulated; 256 is vLLM's number for smaller GPUs."""
MOST_TOKENS: Final = 2048
"""On an H100, where a step with a prompt took 29 ms, 1,024 tokens a step were worth 12 to 15 points
of goodput more than 512, simulated."""
_LEAST_TOKENS: Final = 512
FIXED_SHARE: Final = 0.15
"""Largest share of a step that goes to what it costs however few tokens of a prompt it has."""
_ABOUT_MOST: Final = 0.95
"""Share of the most tokens a second from which further rows are not worth their slower tokens."""


def largest(settings: WorkerSettings) -> WorkerSettings:
    """``settings`` with the sizes that an engine is built for."""
    if settings.engine != "torch" or settings.device != "cuda":
        return settings
    stated = settings.model_fields_set
    tokens = settings.max_step_tokens if "max_step_tokens" in stated else MOST_TOKENS
    rows = settings.max_running if "max_running" in stated else MOST_ROWS
    # Each row needs a token of a step.
    sizes = {"max_running": min(MOST_ROWS, tokens), "max_step_tokens": max(MOST_TOKENS, rows)}
    return settings.model_copy(
        update={name: most for name, most in sizes.items() if name not in stated}
    )


def fitting(settings: WorkerSettings, config: SchedulerConfig, costs: StepCosts) -> SchedulerConfig:
    """``config`` with the sizes that ``costs`` show to be enough, where ``settings``, as they were
    read, state none."""
    if settings.engine != "torch" or settings.device != "cuda":
        return config
    rows, tokens = config.max_running, config.max_step_tokens
    stated = settings.model_fields_set
    if "max_running" not in stated:
        rates = [count / ms for count, ms in zip(costs.rows, costs.step_ms, strict=True)]
        rows = next(
            count
            for count, rate in zip(costs.rows, rates, strict=True)
            if rate >= _ABOUT_MOST * max(rates)
        )
    if "max_step_tokens" not in stated:
        tokens = min(_LEAST_TOKENS, tokens)
        while tokens < config.max_step_tokens and _fixed_share(costs, tokens) > FIXED_SHARE:
            tokens = min(2 * tokens, config.max_step_tokens)
    return replace(config, max_running=rows, max_step_tokens=max(tokens, rows))


def _fixed_share(costs: StepCosts, tokens: int) -> float:
    """Share of a step with ``tokens`` of a prompt that it would take with next to none."""
    fixed_ms = costs.step_ms[0] + costs.prompt_step_ms
    return fixed_ms / (fixed_ms + costs.further_token_ms * tokens)
