"""A real worker on virtual time, complete except for Triton, threads and the model.

A step takes the time of its cost. The engine's clock advances at once; other components receive
the step's results at its end::

    loop's time    t ────────────── t + step_s ─────────
    engine         step ▶ clock reads t + step_s
    frames         ▲ ends found by the look   ▲ tokens
"""

import math
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.clock import Clock, Timer
from protocol import ModelCard, WorkerStats
from worker.core import Event, JobTokens
from worker.engine.engine import Engine, EngineConfig
from worker.loaded import LoadedEngine
from worker.runner.synthetic import PacedDevice, PacedStep, StepCost
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import Plan, StepResult
from worker.scheduler.scheduler import Scheduler
from worker.service.call import Call
from worker.service.worker import Worker
from worker.settings import WorkerSettings
from worker.text.tokenizer import Tokenizer

_TICK_S = 0.05
"""Seconds after which an idle worker looks whether a heartbeat is due."""
_END, _TOKEN = 0, 1


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings of a worker; ``noise`` is the spread of a step's time (sigma of its logarithm).

    Prompts delay a step with decodes by ``max_stall_s`` at most. Frames take ``way_back_s`` on
    average to the orchestrator, in order.
    """

    cost: StepCost
    slots: int
    kv_tokens: int
    step_tokens: int = 512
    min_start_s: float = 0.1
    noise: float = 0.03
    max_stall_s: float = 0.05
    way_back_s: float = 0.0
    prefix_cache: bool = False
    """Whether prefixes are cached, for prompts that begin alike on purpose: made-up ones do by
    chance."""


class _Runner:
    """Runner that makes one token per row. Its steps return at once; ``took_s`` is what the engine
    has waited for them since it was last set."""

    def __init__(self, spec: WorkerSpec, clock: Clock, rng: random.Random) -> None:
        self.cost = spec.cost
        self.took_s = 0.0
        self._device = PacedDevice(lambda: clock.now() + self.took_s, self._wait)
        self._noise = spec.noise
        self._rng = rng

    def _wait(self, seconds: float) -> None:
        self.took_s += seconds

    def execute(self, plan: Plan) -> StepResult:
        return self.launch(plan).collect()

    def launch(self, plan: Plan) -> PacedStep:
        busy_s = self.cost.of(plan) * self._rng.lognormvariate(0.0, self._noise)
        ids: list[list[int]] = []
        for row in plan.rows:
            request = row.request
            made = len(request.tokens) - request.prompt_tokens + 1
            # The last token id that the client sent is how long the answer is by itself.
            length = request.tokens[request.prompt_tokens - 1]
            is_over = made >= length and not request.job.sampling.ignore_eos
            ids.append([_END if is_over else _TOKEN] if row.samples else [])
        launch_s = self.cost.launch_of(plan)
        return self._device.launch(StepResult(ids), launch_s=launch_s, busy_s=busy_s)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class SimWorker:
    """One instance. ``runner.cost`` may be replaced while it runs."""

    def __init__(self, spec: WorkerSpec, card: ModelCard, clock: Clock, rng: random.Random) -> None:
        self.started_late = 0
        """Number of jobs that came when their deadline was past already: there should be none."""
        self._spec = spec
        self._clock = clock
        self._rng = rng
        self.runner = _Runner(spec, clock, rng)
        config = SchedulerConfig(
            vocab_size=card.vocab_size,
            context_tokens=card.context_tokens,
            block_tokens=card.block_tokens,
            max_running=spec.slots,
            max_waiting=card.max_waiting,
            max_step_tokens=spec.step_tokens,
            min_start_budget_s=spec.min_start_s,
            tile_tokens=1,
            max_stall_s=spec.max_stall_s,
            prefix_cache=spec.prefix_cache,
        )
        self._engine = Engine(
            Scheduler(config, BlockPool(spec.kv_tokens // card.block_tokens)),
            self.runner,
            # As on a GPU, where launches take time; a step that costs nothing to launch gains none.
            EngineConfig([_END], overlap=spec.cost.prompt_launch_s > 0),
            clock=self._now,
            draw_seed=lambda: 0,
        )
        self._service = Worker(
            LoadedEngine(self._engine, Tokenizer(card.tokenizer_json, {}, ""), card),
            WorkerSettings.model_construct(model_path=Path()),  # not what the environment says
            clock=self._now,
        )
        self._emitter = self._service.emitter
        self._engine.connect(self._emit)
        self._in_step = False
        self._has_news = False
        """Whether something came while a step was under way."""
        self._next_step: Timer | None = None
        self._dropped_tokens = 0
        self._tick()

    @property
    def tokens_late(self) -> int:
        return self._engine.stats().late_tokens_total + self._dropped_tokens

    def stats(self) -> WorkerStats:
        return self._engine.stats()

    def way_back_s(self) -> float:
        """Seconds that the next frame will be on its way."""
        mean_s = self._spec.way_back_s
        return mean_s * (0.5 + self._rng.expovariate(2.0)) if mean_s else 0.0

    def accept(self, call: Call) -> None:
        """Take a request as Triton would hand it over."""
        self._service.accept(call)
        self._emitter.cycle()
        if self._in_step:
            self._has_news = True
        else:
            self._step()

    def _now(self) -> float:
        """The engine's time, which is ahead of the loop's while a step is computed."""
        return self._clock.now() + self.runner.took_s

    def _tick(self) -> None:
        self._emitter.cycle()
        self._clock.call_at(self._clock.now() + _TICK_S, self._tick)

    def _step(self) -> None:
        if self._next_step is not None:
            self._next_step.cancel()
            self._next_step = None
        self._has_news = False
        events = self._engine.step()
        took_s, self.runner.took_s = self.runner.took_s, 0.0
        if took_s:
            self._in_step = True
            self._clock.call_at(self._clock.now() + took_s, partial(self._step_over, events))
        else:
            self._step_over(events)

    def _step_over(self, events: list[Event]) -> None:
        self._in_step = False
        self._emit([event for event in events if not self._is_late(event)])
        idle_s = 0.0 if self._has_news else self._engine.idle_s()
        if not idle_s:
            self._step()
        elif idle_s < math.inf:
            self._next_step = self._clock.call_at(self._clock.now() + idle_s, self._step)

    def _is_late(self, event: Event) -> bool:
        """Whether these tokens are of a job that was aborted after its step had been computed."""
        if not isinstance(event, JobTokens) or event.job.abort is None:
            return False
        self._dropped_tokens += len(event.ids)
        return True

    def _emit(self, events: list[Event]) -> None:
        self._emitter.sink(events)
        self._emitter.cycle()
