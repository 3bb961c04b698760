"""Records the latest requests and the instances' states. Times, numbers and hashes, no text of a
request. An operator gets all of it as JSON (``GET /admin/recording``), which ``python -m
perf.sim.what_if`` of a checkout replays. Times are in seconds of this process's clock; null there
is infinity here. A request costs some 25 µs on a slow core, and about a kilobyte afterwards.
"""

import asyncio
import math
from collections import deque
from typing import Any, NamedTuple

import msgspec

from orchestrator.clock import Clock
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.prediction.forecaster import Forecaster, length_key
from orchestrator.prediction.step_model import StepModel
from orchestrator.tasks.task import Task
from orchestrator.telemetry.metrics import Kept
from protocol import Code, Outcome

MOST = 4000
"""Requests, and states of instances, that are kept."""
LOOK_EVERY_S = 1.0
"""Shortest time between two looks at the instances."""
MOVE = 0.03
"""Share by which an instance's pace must have moved to be recorded again."""
OUR_REFUSALS = (Code.DEADLINE_INFEASIBLE, Code.DEADLINE_EXCEEDED, Code.QUEUE_FULL)
"""Codes of refusals for lack of time or room; others are about the request or its sender."""
_MAX_TOKENS = 2**20
_AT_ONCE = 50  # running requests that are described before the loop yields


class _Noted(NamedTuple):
    """Notes about a request."""

    left: tuple[float, ...]
    """Equally likely lengths of its answer, as known when it came; none where it is stated."""
    pauses: list[list[float]]


class Recorder:
    """The latest requests and the instances' states."""

    def __init__(self, registry: Registry, forecaster: Forecaster, clock: Clock) -> None:
        self._registry = registry
        self._forecaster = forecaster
        self._clock = clock
        self._noted: dict[Task, _Noted] = {}
        self._ended: deque[msgspec.Raw] = deque(maxlen=MOST)
        self._states: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._known: dict[str, dict[str, Any]] = {}
        """The latest state of each instance."""
        self._look_at = -math.inf
        self._version = -1

    async def recording(self) -> dict[str, object]:
        """Everything recorded. ``is_full``: earlier requests may no longer be kept."""
        requests, is_full = list(self._ended), len(self._ended) == MOST
        for number, (task, noted) in enumerate(list(self._noted.items()), 1):
            requests.append(_described(task, noted))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        states = [*self._known.values(), *self._states]
        return {"requests": requests, "states": states, "is_full": is_full}

    def kept(self) -> Kept:
        """Number of kept requests; an instance's state counts as one."""
        size = sum(memoryview(one).nbytes for one in self._ended)
        return Kept(len(self._ended) + len(self._states), size)

    def offered(self, task: Task) -> None:
        if task.ending is None:
            self._noted[task] = _Noted(self._lengths(task), [])
        self._look(self._clock.now())

    def paused(self, task: Task, now: float) -> None:
        if task in self._noted:
            self._noted[task].pauses.append([now])

    def resumed(self, task: Task, now: float) -> None:
        noted = self._noted.get(task)
        if noted is not None and noted.pauses:
            noted.pauses[-1].append(now)

    def ended(self, task: Task) -> None:
        """Record a task that has ended, unless its refusal has nothing to do with time or room."""
        noted, ending = self._noted.pop(task, None), task.ending
        if ending is None or not task.model:
            return
        if noted is None:
            noted = _Noted(self._lengths(task), [])
            self._look(self._clock.now())
        code = None if ending.error is None else ending.error.code
        if ending.outcome is not Outcome.REFUSED or code in OUR_REFUSALS:
            self._ended.append(_described(task, noted))

    def instances_changed(self) -> None:
        if self._registry.snapshot_version != self._version:
            self._version = self._registry.snapshot_version
            self._look_at = -math.inf
            self._look(self._clock.now())

    def _lengths(self, task: Task) -> tuple[float, ...]:
        """One tuple for all that expect the same."""
        if task.sampling.length_is_stated:
            return ()
        # A refused one may have asked for any number.
        most = min(task.job.max_tokens or task.sampling.max_tokens, _MAX_TOKENS)
        return self._forecaster.lengths.curve(length_key(task)).left(0, max(1, most))

    def _look(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        there, gone = self._registry.instances, {"at": now, "is_reached": False, "is_ready": False}
        for name in self._known.keys() - there.keys():
            self._states.append(self._known.pop(name) | gone)
        for name, instance in there.items():
            state, known = _state_of(instance, now), self._known.get(name)
            if state is not None and (known is None or _differs(state, known)):
                self._known[name] = state
                self._states.append(state)


def _described(task: Task, noted: _Noted) -> msgspec.Raw:
    """The record of a task's current state."""
    job, ending, sampling = task.job, task.ending, task.sampling
    told = {
        "id": task.id,
        "tenant": f"{hash(job.tenant) & 0xFFFFFFFF:x}" if job.tenant else "",
        "model": task.model,
        "priority": job.priority,
        "deadline_at": task.deadline.at,
        "parts": task.parts,
        "on_deadline": job.on_deadline,
        "prompt_tokens": task.prompt_tokens,
        "cached_tokens": task.cached_tokens or task.likely_cached,
        "max_tokens": max(1, job.max_tokens or sampling.max_tokens),
        "min_tokens": sampling.min_tokens,
        "is_length_stated": sampling.length_is_stated,
        "placement": job.placement.mode,
        "placed_on": job.placement.instances,
        "left": noted.left,
        "is_promised": task.is_promised,
        "reserved_chance": task.reserved_chance,
        "calls_left": task.calls_left,
        "between_calls_ms": task.between_calls_ms,
        "is_sample": task.refusal_sample,
        "tokens": task.completion_tokens,
        "marks": task.marks,
        "instance": task.instance,
        "pauses": noted.pauses,
    }
    if ending is not None:
        told |= {
            "outcome": ending.outcome,
            "code": "" if ending.error is None else ending.error.code,
            "reason": ending.finish_reason,
            "missed_part": ending.missed_part,
        }
    return msgspec.Raw(msgspec.json.encode(told))


def _state_of(instance: Instance, now: float) -> dict[str, Any] | None:
    """An instance at one moment; None until its worker has reported."""
    card, stats, learner = instance.card, instance.stats, instance.step_learner
    if card is None or learner is None:
        return None
    return {
        "at": now,
        "name": instance.address,
        "model": card.model,
        "is_reached": any(lane.is_open for lane in instance.lanes),
        "is_ready": instance.ready,
        "context_tokens": card.context_tokens,
        "block_tokens": card.block_tokens,
        "kv_blocks": 0 if stats is None else stats.kv_blocks_total,
        "max_running": card.max_running,
        "max_step_tokens": card.max_step_tokens,
        "min_start_ms": card.min_start_budget_ms,
        "most_rows": instance.concurrency.best_rows,
        "pace": learner.model,
    }


def _differs(state: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether it came or went, or its steps take noticeably longer or shorter."""
    if any(state[name] != known[name] for name in ("is_reached", "is_ready", "model")):
        return True
    figures = zip(_figures(state["pace"]), _figures(known["pace"]), strict=True)
    return any(abs(new - old) > MOVE * old for new, old in figures)


def _figures(pace: StepModel) -> tuple[float, ...]:
    step_ms = pace.base_ms + max(1, pace.slots // 2) * pace.row_ms
    return step_ms, pace.prompt_token_ms, pace.slow, float(pace.known)
