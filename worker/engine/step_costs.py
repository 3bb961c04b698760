"""Measures at load what steps of each size take, so that forecasts need not wait for a crowd.

A step's time is no straight line over its rows: products change their shape, graphs their size. It
is measured as a service will see it, by the runner, in internal requests.
"""

import math
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Final

from protocol import Sampling, StepCosts
from worker.core import Job
from worker.runner.base import Runner
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import Plan, Row
from worker.scheduler.request import make_request
from worker.scheduler.scheduler import Scheduler

ROUNDS: Final = 10
"""Most times that each size is measured, in turns; the least counts, which neighbors disturbed
least. Beside two busy processes 3 rounds had 2.7 to 7.8 ms for the demo model's step of one row,
10 rounds 2.4 to 2.6 in two of three starts."""
BUDGET_S: Final = 0.5
"""Seconds after which no further round begins, so that a start stays short on a slow machine."""


def measure(runner: Runner, config: SchedulerConfig, blocks: int) -> StepCosts | None:
    """Measure steps that decode 1, 2, 4 … rows, and one full of a prompt. None where the pool of
    ``blocks`` cannot hold two requests."""
    scheduler = Scheduler(replace(config, prefix_cache=False), BlockPool(blocks))
    most = 1 + config.max_running.bit_length()
    rounds = min(ROUNDS, (scheduler.capacity_tokens - 2) // most)
    sampling = Sampling(max_tokens=2 + rounds * most)
    for _ in range(config.max_running):
        _enqueue(scheduler, [0], sampling)
    rows = _rows(scheduler)
    sizes = [1 << power for power in range(len(rows).bit_length()) if 1 << power < len(rows)]
    sizes.append(len(rows))
    if len(sizes) < 2 or rounds < 1:
        return None
    _step(runner, scheduler, rows)  # the prompts: all that has to be set up once
    took_s = dict.fromkeys(sizes, math.inf)
    began = monotonic()
    for number in range(rounds):
        if number and monotonic() - began > BUDGET_S:
            break
        for size in sizes:
            row_s = _step(runner, scheduler, _rows(scheduler)[:size])
            took_s[size] = min(took_s[size], row_s)
    for request in list(scheduler.running):
        scheduler.release(request)
    tokens = min(config.max_step_tokens, scheduler.capacity_tokens - 2)
    few = max(1, tokens // 4)
    few_ms, full_ms = (1000 * _prompt_s(runner, scheduler, count) for count in (few, tokens))
    # More rows never take less: what looks so is noise.
    times = [1000 * max(took_s[s] for s in sizes[: at + 1]) for at in range(len(sizes))]
    further_ms = max(0.0, full_ms - few_ms) / max(1, tokens - few)
    return StepCosts(
        rows=tuple(sizes),
        step_ms=tuple(times),
        prompt_token_ms=max(0.0, full_ms - times[0]) / tokens,
        prompt_step_ms=max(0.0, few_ms - times[0] - further_ms * few),
        further_token_ms=further_ms,
    )


def _prompt_s(runner: Runner, scheduler: Scheduler, tokens: int) -> float:
    """Seconds of a step of a prompt of so many ``tokens``."""
    least_s = math.inf
    for _ in range(2):
        if BUDGET_S < least_s < math.inf:
            break
        _enqueue(scheduler, [0] * tokens, Sampling(max_tokens=1))
        rows = _rows(scheduler)
        least_s = min(least_s, _step(runner, scheduler, rows))
        scheduler.release(rows[0].request)
    return least_s


def _enqueue(scheduler: Scheduler, ids: list[int], sampling: Sampling) -> None:
    job = Job(ids, sampling, math.inf)
    scheduler.enqueue(make_request(job, submitted_at=0.0, own_seed=0), 0.0)


def _rows(scheduler: Scheduler) -> list[Row]:
    plan = scheduler.schedule().plan
    return [] if plan is None else plan.rows


def _step(runner: Runner, scheduler: Scheduler, rows: list[Row]) -> float:
    """Seconds that a step of ``rows`` takes, on the device's clock where it has one."""
    decodes = sum(1 for row in rows if row.start)
    began = perf_counter()
    result = runner.execute(Plan(rows, decodes, sum(row.count for row in rows)))
    took_s = perf_counter() - began
    for row, ids in zip(rows, result.ids, strict=True):
        scheduler.advance(row, ids)
    return took_s if result.device is None else result.device.busy_s
