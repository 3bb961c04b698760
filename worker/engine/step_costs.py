"""Measures the time of steps of each size at load, so that forecasts work before traffic comes.

A step's time is not linear in its rows: matrix products change shape and graphs change size. The
runner computes internal requests, so the measured time is what the service will see.

On CUDA the measurement sets a step's maximum rows and tokens if the operator does not (WK-13): GPU
models differ in a step's fixed cost. So the engine is built for the largest sizes, and once steps
are measured, the smallest sizes that lose nothing are used.
"""

import math
from dataclasses import replace
from time import monotonic, perf_counter, process_time
from typing import Final

from protocol import Sampling, StepCosts
from worker.core import Job
from worker.errors import BrokenCheckpoint
from worker.kv_disk.base import KVMemory
from worker.runner.base import Runner
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import Plan, Row
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler
from worker.settings import WorkerSettings

ROUNDS: Final = 10
"""Maximum number of rounds; each round measures every size once. The minimum counts, because other
processes disturbed it least. Next to two busy processes, 3 rounds measured 2.7 to 7.8 ms for the
demo model's step of one row; 10 rounds measured 2.4 to 2.6 ms in two of three starts."""
_LEAST_S: Final = 1e-9
CONTEXT_TOKENS, CONTEXT_BYTES = 512, 2**26
"""The first: tokens of context per row in the steps that measure the cost of context, and the least
room that a row needs so that rows do not pause each other. The second: maximum bytes of these
contexts together, more than caches hold and little compared with a model."""
_CONTEXT_STEPS: Final = 4
"""Maximum number of steps per context length; the minimum time counts."""
BUDGET_S: Final = 0.5
"""Seconds after which no further round begins, so that startup stays short on a slow machine. Each
other measurement repeats its step within a quarter of this: noise matters little in a long step."""


def measure(
    runner: Runner,
    config: SchedulerConfig,
    blocks: int,
    memory: KVMemory | None = None,
    *,
    on_cpu: bool = False,
) -> StepCosts | None:
    """Measure steps that decode 1, 2, 4 … rows, a step full of prompt tokens, and the cost of long
    contexts. None if the pool of ``blocks``, which ``memory`` can write to, cannot hold two
    requests. ``on_cpu``: other processes may take the cores; this process's CPU time shows that."""
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
    _step(runner, scheduler, rows)  # process the prompts, which covers all one-time setup
    took_s = dict.fromkeys(sizes, math.inf)
    began, cpu_began_s, all_s = monotonic(), process_time(), 0.0
    for number in range(rounds):
        if number and monotonic() - began > BUDGET_S:
            break
        for size in sizes:
            row_s = _step(runner, scheduler, _rows(scheduler)[:size])
            took_s[size] = min(took_s[size], row_s)
            all_s += row_s
    cpu_s = max(process_time() - cpu_began_s, _LEAST_S)
    for request in [*scheduler.running, *scheduler.waiting]:  # some wait if the pool is small
        scheduler.release(request)
    tokens = min(config.max_step_tokens, scheduler.capacity_tokens - 2)
    few = max(1, tokens // 4)
    few_ms, full_ms = (1000 * _prompt_s(runner, scheduler, count) for count in (few, tokens))
    own_blocks = blocks // config.max_running
    if memory is not None:
        most_blocks = CONTEXT_BYTES // memory.format.block_bytes
        own_blocks = min(own_blocks, most_blocks // config.max_running)
    own_tokens = min(CONTEXT_TOKENS, own_blocks * config.block_tokens, scheduler.capacity_tokens)
    context_s = 0.0 if memory is None else _context_s(runner, scheduler, memory, own_tokens)
    # More rows never take less time; a lower measurement is noise.
    times = [1000 * max(took_s[s] for s in sizes[: at + 1]) for at in range(len(sizes))]
    further_ms = max(0.0, full_ms - few_ms) / max(1, tokens - few)
    return StepCosts(
        rows=tuple(sizes),
        step_ms=tuple(times),
        prompt_token_ms=max(0.0, full_ms - times[0]) / tokens,
        prompt_step_ms=max(0.0, few_ms - times[0] - further_ms * few),
        further_token_ms=further_ms,
        context_token_ms=1000 * context_s,
        doubt=math.log(max(1.0, all_s / cpu_s)) if on_cpu else 0.0,
    )


def _prompt_s(runner: Runner, scheduler: Scheduler, tokens: int) -> float:
    """Seconds of a step that computes ``tokens`` tokens of a prompt."""
    least_s = math.inf
    for _ in range(2):
        if BUDGET_S / 4 < least_s < math.inf:
            break
        _enqueue(scheduler, [0] * tokens, Sampling(max_tokens=1))
        rows = _rows(scheduler)
        least_s = min(least_s, _step(runner, scheduler, rows))
        scheduler.release(rows[0].request)
    return least_s


def _context_s(runner: Runner, scheduler: Scheduler, memory: KVMemory, tokens: int) -> float:
    """Seconds that each token of context adds to a step of all rows, from a step with contexts of
    ``tokens`` tokens and one with a quarter of that. The contexts are not computed: zeros, once
    written, take as long to read. 0 if there is no room to measure it."""
    took_s: list[float] = []
    contexts = max(1, tokens // 4), tokens - _CONTEXT_STEPS - 1
    if contexts[1] <= contexts[0]:
        return 0.0
    for context in contexts:
        for _ in range(scheduler.config.max_running):
            _enqueue(scheduler, [0] * context, Sampling(max_tokens=_CONTEXT_STEPS + 1))
        while prompts := [row for row in _rows(scheduler) if row.start + row.count <= context]:
            for row in prompts:
                scheduler.advance(row, [0] if row.samples else [])
        rows = _rows(scheduler)
        memory.clear([block for row in rows for block in row.request.blocks])
        steps_s = [_step(runner, scheduler, rows)]
        while len(steps_s) < _CONTEXT_STEPS and sum(steps_s) < BUDGET_S / 4:
            steps_s.append(_step(runner, scheduler, _rows(scheduler)))
        took_s.append(min(steps_s))
        for row in rows:
            scheduler.release(row.request)
    return max(0.0, took_s[1] - took_s[0]) / (len(rows) * (contexts[1] - contexts[0]))


def _enqueue(scheduler: Scheduler, ids: list[int], sampling: Sampling) -> None:
    job = Job(ids, sampling, math.inf)
    scheduler.enqueue(Request(job, submitted_at=0.0, own_seed=0), 0.0)


def _rows(scheduler: Scheduler) -> list[Row]:
    plan = scheduler.schedule().plan
    return [] if plan is None else plan.rows


def _step(runner: Runner, scheduler: Scheduler, rows: list[Row]) -> float:
    """Seconds that a step of ``rows`` takes, on the device's clock if it has one. Raises
    ``BrokenCheckpoint`` if its numbers are not finite."""
    decodes = sum(1 for row in rows if row.start)
    began = perf_counter()
    result = runner.execute(Plan(rows, decodes, sum(row.count for row in rows)))
    took_s = perf_counter() - began
    if result.not_finite:
        raise BrokenCheckpoint(
            "the model computes NaN or infinite numbers: check its files (tidegate models verify), "
            "or set TIDEGATE_WORKER__DTYPE=float32"
        )
    for row, ids in zip(rows, result.ids, strict=True):
        scheduler.advance(row, ids)
    return took_s if result.device is None else result.device.busy_s


MOST_ROWS: Final = 256
"""In a simulation with an H100's step times and first come, first served, 77.5 % of conversations
met their targets with 128 rows and 68.7 % with 64. 256 is vLLM's number for smaller GPUs."""
MOST_TOKENS: Final = 4096
"""An H100's step, with 13 ms of fixed cost and 0.023 ms per token, needs 3,200 for ``FIXED_SHARE``.
In a simulation of one with steps of 29 ms, 1,024 tokens gave 12 to 15 points more goodput than 512.
"""
_LEAST_TOKENS: Final = 512
FIXED_SHARE: Final = 0.15
"""Largest acceptable share of a step's fixed cost, which it has even with few prompt tokens."""
_ABOUT_MOST: Final = 0.95
"""Share of the maximum tokens per second above which more rows are not worth slower tokens."""


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


def fitting(
    settings: WorkerSettings, config: SchedulerConfig, costs: StepCosts, blocks: int
) -> SchedulerConfig:
    """``config`` with the sizes that ``costs`` show to be enough, unless ``settings``, as read,
    state them; no more rows than fit in a pool of ``blocks``."""
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
        rows = min(rows, max(1, blocks * config.block_tokens // CONTEXT_TOKENS))
    if "max_step_tokens" not in stated:
        tokens = min(_LEAST_TOKENS, tokens)
        while tokens < config.max_step_tokens and _fixed_share(costs, tokens) > FIXED_SHARE:
            tokens = min(2 * tokens, config.max_step_tokens)
    return replace(config, max_running=rows, max_step_tokens=max(tokens, rows))


def _fixed_share(costs: StepCosts, tokens: int) -> float:
    """Share of a step with ``tokens`` prompt tokens that it would take with almost none."""
    fixed_ms = costs.step_ms[0] + costs.prompt_step_ms
    return fixed_ms / (fixed_ms + costs.further_token_ms * tokens)
