"""Records what became of the latest requests, and how the instances were meanwhile.

Bounded: as many requests as the settings say, and as many states of instances. A request costs some
25 µs on a slow core, a fifth of that when it is let in, and about a kilobyte afterwards.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from orchestrator.clock import Clock
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.prediction.forecaster import Forecaster, length_key
from orchestrator.prediction.step_model import StepModel
from orchestrator.recording.facts import (
    InstanceAt,
    InstanceFacts,
    PauseTaken,
    RecordedRequest,
    Recording,
    facts_of,
)
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from protocol import Outcome

LOOK_EVERY_S = 1.0
"""Shortest time between two looks at the instances."""
MOVE = 0.03
"""Share by which an instance's pace must have moved to be recorded anew."""
_MAX_TOKENS = 2**20
WARM_S = 3.0
"""Seconds before the first request that shared its time with the asked one from which on others are
replayed too: by then the instances are as busy as they were."""
MAX_WARM = 100
"""Most requests that are replayed though they ended before the asked one came, the latest ones."""
AFTER_S = 60.0
"""Seconds after the deadline of the asked request up to which later ones are replayed."""
MAX_GONE = 64
"""Most instances that are remembered beyond those that there are."""
MAX_REQUESTS = 400
"""Most requests that are replayed."""


@dataclass(slots=True)
class _Noted:
    """What was noted of a request on its way."""

    left: tuple[float, ...]
    pauses: list[PauseTaken] = field(default_factory=list)


class _Known(NamedTuple):
    """The latest recorded state of an instance, and the facts beside it."""

    state: InstanceAt
    facts: InstanceFacts


class Recorder:
    """The latest requests, and the instances' states meanwhile."""

    def __init__(self, registry: Registry, forecaster: Forecaster, clock: Clock, most: int) -> None:
        """``most`` requests are kept."""
        self.most = most
        self._registry = registry
        self._forecaster = forecaster
        self._clock = clock
        self._noted: dict[Task, _Noted] = {}
        self._ended: OrderedDict[str, RecordedRequest] = OrderedDict()
        self._states: deque[InstanceAt] = deque(maxlen=most)
        self._known: dict[str, _Known] = {}
        self._look_at = -math.inf
        self._version = -1
        """Version of the registry's snapshot when the instances were looked at for its sake."""
        self._lost_until = -math.inf
        """When the latest of the requests ended that are no longer kept."""

    def __iter__(self) -> Iterator[RecordedRequest]:
        """Recorded requests, in the order in which they ended."""
        return iter(self._ended.values())

    # ── what is recorded ─────────────────────────────────────────────────────────────────────

    def offered(self, task: Task) -> None:
        """Note a task that was let in."""
        if task.ending is None:
            self._noted[task] = _Noted(self._lengths(task))
        self._look(self._clock.now())

    def paused(self, task: Task, other: Task | None, now: float) -> None:
        """Note that a task was paused for the ``other`` one, or for nobody."""
        noted = self._noted.get(task)
        if noted is None:
            return
        left_s = None if other is None else other.deadline.at - now
        is_for_batch = other is not None and other.priority is Priority.BATCH
        noted.pauses.append(
            PauseTaken(now, task.paused_on, left_s=left_s, is_for_batch=is_for_batch)
        )

    def resumed(self, task: Task, now: float) -> None:
        """Note that a paused task goes on."""
        noted = self._noted.get(task)
        if noted is not None and noted.pauses:
            noted.pauses[-1].until = now

    def ended(self, task: Task) -> None:
        """Record a task that has ended, unless its refusal has nothing to do with time or room."""
        noted = self._noted.pop(task, None)
        if not task.model:
            return
        if noted is None:
            noted = _Noted(self._lengths(task))
            self._look(self._clock.now())
        facts = facts_of(task, noted.left, tuple(noted.pauses))
        if facts.outcome is Outcome.REFUSED and not facts.is_miss:
            return
        self._ended[task.id] = facts
        while len(self._ended) > self.most:
            _, gone = self._ended.popitem(last=False)
            self._lost_until = gone.ended

    def instances_changed(self) -> None:
        """Record instances that came, went or changed their state, when they did."""
        if self._registry.snapshot_version != self._version:
            self._version = self._registry.snapshot_version
            self._look_at = -math.inf
            self._look(self._clock.now())

    def _lengths(self, task: Task) -> tuple[float, ...]:
        if task.sampling.length_is_stated or task.job.embeds:
            return ()
        # A refused one may have asked for any number.
        most = min(task.job.max_tokens or task.sampling.max_tokens, _MAX_TOKENS)
        # One tuple for all that expect the same.
        return self._forecaster.lengths.curve(length_key(task)).left(0, max(1, most))

    def _look(self, now: float) -> None:
        """Record the instances whose state has changed."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        there = self._registry.instances
        for instance in there.values():
            self._look_at_instance(instance, now)
        for name in self._known.keys() - there.keys():
            state, facts = self._known[name]
            if state.is_reached:
                gone = structs.replace(state, at=now, is_reached=False, is_ready=False)
                self._record(gone, facts)
        if len(self._known) > MAX_GONE + len(there):
            self._known = {name: one for name, one in self._known.items() if name in there}

    def _look_at_instance(self, instance: Instance, now: float) -> None:
        card, learner = instance.card, instance.step_learner
        if card is None or learner is None:
            return
        state = InstanceAt(
            now,
            instance.address,
            any(lane.is_open for lane in instance.lanes),
            instance.ready,
            instance.concurrency.best_rows,
            learner.model,
        )
        known = self._known.get(instance.address)
        if known is None or known.facts.model != card.model or _differs(state, known.state):
            self._record(state, _facts_of(instance))

    def _record(self, state: InstanceAt, facts: InstanceFacts) -> None:
        self._known[state.name] = _Known(state, facts)
        self._states.append(state)

    # ── what is asked ────────────────────────────────────────────────────────────────────────

    def find(self, name: str, task_id: str) -> Iterator[RecordedRequest]:
        """The recorded requests that are called so: by their own id, by their answer's, or, where
        none is, the latest by its correlation id ``name``."""
        found = self._ended.get(task_id)
        if found is not None:
            yield found
            return
        chosen = [one for one in self._ended.values() if one.leader_id == task_id]
        if not chosen:
            hashed = hash(name)
            chosen = [one for one in reversed(self._ended.values()) if one.name_hash == hashed]
        yield from chosen

    def around(self, asked: RecordedRequest) -> Recording:
        """What surrounds a recorded request."""
        until = max(asked.deadline_at, asked.ended)
        last = until + AFTER_S
        every = [*self._ended.values(), *self._going_on()]
        every = [one for one in every if one.model == asked.model and one.arrived <= last]
        every.sort(key=lambda one: one.arrived)
        beside = [one for one in every if one.ended >= asked.arrived and one.arrived <= until]
        warm_from = beside[0].arrived - WARM_S
        warm = [one for one in every if warm_from <= one.ended < asked.arrived][-MAX_WARM:]
        later = [one for one in every if one.arrived > until]
        chosen = _around(asked, beside)
        room = MAX_REQUESTS - len(chosen)
        is_cut = len(chosen) < len(beside) or self._lost_until >= asked.arrived
        chosen += [*warm[max(0, len(warm) - room) :], *later[: max(0, room - len(warm))]]
        chosen.sort(key=lambda one: one.arrived)
        states = list(self._states_until(last))
        told = {state.name for state in states}
        serving = [one.facts for one in self._known.values() if one.facts.model == asked.model]
        instances = [facts for facts in serving if facts.name in told]
        names = {facts.name for facts in instances}
        return Recording(
            asked=asked.id,
            requests=chosen,
            instances=instances,
            states=[state for state in states if state.name in names],
            is_cut=is_cut,
        )

    def _going_on(self) -> Iterator[RecordedRequest]:
        """Requests that were let in and have not ended."""
        for task, noted in self._noted.items():
            yield facts_of(task, noted.left, tuple(noted.pauses))

    def _states_until(self, last: float) -> Iterator[InstanceAt]:
        """Recorded states, with the latest known one of those instances that have no other left."""
        there = {state.name for state in self._states}
        yield from (one.state for one in self._known.values() if one.state.name not in there)
        yield from (state for state in self._states if state.at <= last)


def _around(asked: RecordedRequest, requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """``asked`` and those that came next to it, at most ``MAX_REQUESTS``."""
    at = next(number for number, one in enumerate(requests) if one.id == asked.id)
    first = max(0, min(at - MAX_REQUESTS // 2, len(requests) - MAX_REQUESTS))
    return requests[first : first + MAX_REQUESTS]


def _facts_of(instance: Instance) -> InstanceFacts:
    card, stats = instance.card, instance.stats
    assert card is not None
    return InstanceFacts(
        name=instance.address,
        model=card.model,
        context_tokens=card.context_tokens,
        block_tokens=card.block_tokens,
        kv_blocks=0 if stats is None else stats.kv_blocks_total,
        max_running=card.max_running,
        max_step_tokens=card.max_step_tokens,
        min_start_ms=card.min_start_budget_ms,
        abort_ms=card.abort_ms,
        can_pause=card.can_pause,
        can_continue=card.can_continue,
    )


def _differs(state: InstanceAt, known: InstanceAt) -> bool:
    if (state.is_reached, state.is_ready) != (known.is_reached, known.is_ready):
        return True
    return state.pace is not known.pace and _has_moved(state.pace, known.pace)


def _has_moved(pace: StepModel, before: StepModel) -> bool:
    """Whether steps take noticeably longer or shorter than before, in any of their parts."""
    rows = max(1, pace.slots // 2)
    pairs = (
        (pace.base_ms + rows * pace.row_ms, before.base_ms + rows * before.row_ms),
        (pace.prompt_token_ms, before.prompt_token_ms),
        (pace.mid, before.mid),
        (pace.high, before.high),
    )
    return pace.known is not before.known or any(abs(new - old) > MOVE * old for new, old in pairs)
