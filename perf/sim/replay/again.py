"""A recording once more: its requests as arrivals, its instances as virtual ones, and what becomes
of each request, with nothing changed or with one thing.

When the request comes that is asked about, the replay is given what was under way then::

    earlier requests ─▶ all that is learnt ─▶ cleared ─▶ what ran and waited, as far as it was
                                                      ─▶ the asked request, and what came later

A request's answer is as long as it was. Where something cut it, it is as long as half of such
answers are that get so far, by what was known when the request came.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from orchestrator.dispatch.attempt import Attempt
from orchestrator.errors import TidegateError
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.service import Orchestrator, Reading
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Part, Parts
from orchestrator.tasks.job import Api, Job, PlacementConstraint, PlacementMode
from orchestrator.tasks.task import EarlierText, Task
from perf.sim.replay.known import (
    LengthsAsKnown,
    SettingsAsTold,
    StatesAsRecorded,
    cost_of,
    learnt,
    length_of,
)
from perf.sim.replay.lane import SimLane
from perf.sim.replay.loop import VirtualClock, VirtualLoop, run_quietly
from perf.sim.replay.recording import InstanceAt, RecordedLoad, RecordedRequest
from perf.sim.replay.service import VirtualInstance, VirtualService, new_service, virtual_card
from perf.sim.replay.under_way import UnderWay, under_way
from perf.sim.replay.worker import BEGUN, WorkerSpec
from protocol import Delta, OnDeadline, Outcome, Sampling

BEFORE_S: Final = 1.0
"""Seconds of a replay before its first request, in which the instances come up."""
LINGER_S: Final = 0.2
"""Seconds after its deadline in which the asked request's end is reported."""
LATE_S: Final = 2.0
"""Seconds by which requests may end later than recorded in a replay without a change."""
ADDED: Final = "one more"
"""Name of an instance that is added."""
_LOOK_EVERY_S = 0.25
_PUT_S: Final = 0.005
"""Seconds before the asked request's arrival at which the replay gets what was under way then."""
_FIRST_OWN_ID = 2**18
_NEVER_AGAIN: Final = 2**20
"""Pauses after which a job is not paused any more."""


@dataclass(frozen=True, slots=True)
class OneThing:
    """What is not as it was recorded: one of these, or nothing."""

    is_let_in: bool = False
    is_never_paused: bool = False
    has_one_more: bool = False
    later_s: float = 0.0
    is_alone: bool = False

    @property
    def begins_as_recorded(self) -> bool:
        """Whether everything is as it was when the asked request came."""
        return not (self.is_alone or self.has_one_more)


NOTHING: Final = OneThing()


@dataclass(slots=True)
class ReplayedRequest:
    """What became of a request in a replay; ``ended`` is on the recording's clock."""

    outcome: Outcome | None = None
    ended: float = math.inf
    tokens: int = 0
    pauses: int = 0


@dataclass(slots=True)
class Replayer:
    """Replays one recording, as often as is asked."""

    recording: RecordedLoad
    _lengths: dict[str, int] = field(default_factory=dict)

    def length(self, request: RecordedRequest) -> int:
        """Tokens of a request's answer in the replay, at most its ``max_tokens``."""
        known = self._lengths.get(request.id)
        if known is None:
            known = self._lengths[request.id] = length_of(request)
        return known

    def run(self, change: OneThing = NOTHING) -> dict[str, ReplayedRequest]:
        """What becomes of the requests, by id; with a change, until the asked one has ended."""
        return run_quietly(lambda loop: _Run(self, change, loop).go())


class _Run:
    """One replay."""

    def __init__(self, replayer: Replayer, change: OneThing, loop: VirtualLoop) -> None:
        self._replayer = replayer
        self._recording = replayer.recording
        self._asked = self._recording.request
        self._states = StatesAsRecorded(self._recording.states)
        self._change = change
        self._loop = loop
        self._clock = VirtualClock(loop)
        self._shift = self._requests[0].arrived - BEFORE_S
        self._addresses = {
            name: f"i{at}:1" for at, name in enumerate([*self._recording.instances, ADDED])
        }
        """Addresses in the replay, by name: some instances are not named by theirs."""
        self._service = self._new_service()
        self._orchestrator: Orchestrator = self._service.parts.orchestrator
        self._lengths = LengthsAsKnown()
        self._results: dict[str, ReplayedRequest] = {}
        self._submitting: set[asyncio.Task[None]] = set()
        self._tasks: list[Task] = []

    @property
    def _requests(self) -> Sequence[RecordedRequest]:
        return [self._asked] if self._change.is_alone else self._recording.requests

    async def go(self) -> dict[str, ReplayedRequest]:
        parts, clock = self._service.parts, self._clock
        parts.forecaster.lengths = self._lengths
        samples = {one.id for one in self._recording.requests if one.is_sample}
        if self._change.is_let_in:
            samples.add(self._asked.id)
        self._orchestrator.refusals.in_sample = lambda task: task.correlation_id in samples
        parts.lifecycle.start()
        self._follow_instances()
        requests = self._requests
        if self._change.begins_as_recorded:
            at = self._asked.arrived
            clear_at = at - _PUT_S - self._clearing_s()
            self._loop.call_at(clear_at - self._shift, self._clear)
            self._loop.call_at(at - _PUT_S - self._shift, self._put_under_way)
            requests = [one for one in requests if not clear_at < one.arrived < at]
        for request in requests:
            self._loop.call_at(request.arrived - self._shift, self._arrive, request)
        is_whole = self._change is NOTHING
        awaited = [one.id for one in self._recording.compared] if is_whole else [self._asked.id]
        until = max(self._asked.deadline_at, self._asked.ended) + self._change.later_s
        until += (LATE_S if is_whole else LINGER_S) - self._shift
        try:
            left_s = until - clock.now()
            while left_s > 1e-6 and not self._have_ended(awaited):
                await asyncio.sleep(min(_LOOK_EVERY_S, left_s))
                left_s = until - clock.now()
            # What has not ended is about to be ended by the drain.
            return {name: replace(result) for name, result in self._results.items()}
        finally:
            await parts.lifecycle.drain(0.0)
            await parts.lifecycle.close()

    def _have_ended(self, names: Sequence[str]) -> bool:
        results = self._results
        return all(name in results and results[name].outcome is not None for name in names)

    # ── the moment of the asked request's arrival ────────────────────────────────────────────

    def _clearing_s(self) -> float:
        """Seconds that the instances need at most to be rid of what they do."""
        steps_ms = (
            pace.base_ms + pace.slots * pace.row_ms + pace.step_tokens * pace.prompt_token_ms
            for pace in (
                self._states.pace(name, self._asked.arrived) for name in self._recording.instances
            )
        )
        return 2 * max(steps_ms, default=0.0) / 1000 + _PUT_S

    def _clear(self) -> None:
        """Give up all that is under way in the replay, whose end does not count."""
        for task in self._tasks:
            if task.ending is None:
                self._orchestrator.cancel(task)
        self._tasks.clear()

    def _put_under_way(self) -> None:
        """Have under way what was, as far as it was: first what ran, then what waited."""
        at = self._asked.arrived
        known_until = max(
            time for one in self._requests for time in (one.arrived, one.ended) if time < math.inf
        )
        found = [under_way(one, at, known_until) for one in self._requests]
        put = [one for one in found if one is not None]
        try:
            encoder = self._orchestrator.models.resolve(self._asked.model)
        except TidegateError:  # no instance serves it at that moment
            return
        forecaster, now = self._service.parts.forecaster, self._clock.now()
        running = [self._begun(one, encoder) for one in put if one.instance]
        waiting = [self._begun(one, encoder) for one in put if not one.instance]
        for task in running:
            self._orchestrator.requeue(task)
        forecaster.look_anew()
        for _ in range(2):  # how long one waits depends on what the others take
            for task in waiting:
                forecaster.plan(task, now)
            forecaster.begin_plans(waiting, now)
        for task in waiting:
            self._orchestrator.requeue(task)

    def _begun(self, begun: UnderWay, encoder: PromptEncoder) -> Task:
        """A task that has come as far as a request had. Nothing refuses it."""
        request, orchestrator, card = begun.request, self._orchestrator, encoder.card
        job = self._job(request)
        if begun.instance:
            address = self._addresses.get(begun.instance, begun.instance)
            job = replace(job, placement=PlacementConstraint(PlacementMode.PREFER, (address,)))
        task = Task(orchestrator.ids.new(), job)
        task.model, task.block_tokens = card.model, card.block_tokens
        task.vocabulary = encoder.vocabulary
        task.token_ids = self._prompt(request, max(1, begun.prompt_tokens))
        task.prompt_tokens = len(task.token_ids)
        orchestrator.stages.admission.fit(task, card)
        orchestrator.readmit(task)
        task.listen(self._listener(request))
        if begun.made:
            texts = [""] * begun.made
            task.earlier = EarlierText([BEGUN] * begun.made, texts, lambda: None)
            task.restore()
            task.is_resumable, task.begun_by_weights = True, card.model_digest
            task.marks.first_token = request.marks.first_token - self._shift
            if request.marks.first_token > request.parts.first_token_at:
                task.late_part = Part.FIRST_TOKEN
        self._know(task, request)
        self._follow(task, request)
        return task

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def _arrive(self, request: RecordedRequest) -> None:
        task = asyncio.ensure_future(self._submit(request))
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)

    async def _submit(self, request: RecordedRequest) -> None:
        listener = self._listener(request)
        try:
            job = self._job(request)
            encoder = self._orchestrator.models.resolve(request.model)
            ids = self._prompt(request, max(1, request.prompt_tokens - request.cached_tokens))
            task = await self._orchestrator.prepare(job, ids, Reading(encoder, ids, (), ()))
            self._know(task, request)
            self._orchestrator.offer(task, [listener])
        except TidegateError:
            listener.result.outcome = Outcome.REFUSED
            listener.result.ended = self._clock.now() + self._shift
            return
        self._follow(task, request)

    def _listener(self, request: RecordedRequest) -> "_Listener":
        """A listener that notes what becomes of a request."""
        result = self._results[request.id] = ReplayedRequest()
        is_never_paused = self._change.is_never_paused and request is self._asked
        return _Listener(result, self._shift, is_never_paused=is_never_paused)

    def _know(self, task: Task, request: RecordedRequest) -> None:
        """Know of a task what was known of it when it came."""
        task.calls_left, task.between_calls_ms = request.calls_left, request.between_calls_ms
        task.is_promised = request.is_promised
        task.reserved_chance = request.reserved_chance
        self._lengths.tell(task, request.left)

    def _follow(self, task: Task, request: RecordedRequest) -> None:
        """Have a task that was let in meet the fate that was done to it."""
        self._tasks.append(task)
        if request.outcome in (Outcome.ABORTED, Outcome.FAILED):
            self._loop.call_at(request.ended - self._shift, self._orchestrator.cancel, task)

    def _job(self, request: RecordedRequest) -> Job:
        later_s = self._change.later_s if request.id == self._asked.id else 0.0
        deadline_at = request.deadline_at - self._shift + later_s
        # A worker on virtual time has no sentences to finish; either ends in time.
        finishes = request.on_deadline is OnDeadline.FINISH
        most = request.max_tokens
        return Job(
            api=Api.NATIVE,
            model=request.model,
            sampling=Sampling(
                max_tokens=most,
                min_tokens=min(request.min_tokens, most),
                ignore_eos=request.is_length_stated,
            ),
            max_tokens=most,
            cuts_max_tokens=True,
            deadline=Deadline(deadline_at, 0),
            parts=self._parts(request),
            correlation_id=request.id,
            arrived=request.arrived - self._shift,
            on_deadline=OnDeadline.FIT if finishes else request.on_deadline,
            priority=request.priority,
            tenant=request.tenant,
            placement=PlacementConstraint(
                request.placement,
                tuple(self._addresses.get(name, name) for name in request.placed_on),
            ),
        )

    def _parts(self, request: RecordedRequest) -> Parts:
        parts = request.parts
        if parts == NO_PARTS:
            return NO_PARTS
        later_s = self._change.later_s if request.id == self._asked.id else 0.0
        moved = later_s - self._shift
        return Parts(parts.first_token_at + moved, parts.token_gap_s, parts.cut_at + moved)

    def _prompt(self, request: RecordedRequest, new: int) -> tuple[int, ...]:
        """Token ids of the ``new`` tokens of a prompt that are to be computed; the last is the
        answer's length (``worker``)."""
        own = _FIRST_OWN_ID + hash(request.id) % _FIRST_OWN_ID
        return (own,) * (new - 1) + (self._replayer.length(request),)

    # ── instances ────────────────────────────────────────────────────────────────────────────

    def _new_service(self) -> VirtualService:
        known = self._recording.instances
        machines = {self._addresses[name]: self._machine(one) for name, one in known.items()}
        if self._change.has_one_more:
            machines[self._addresses[ADDED]] = self._machine(known[self._first_ready()])
        told = dict(self._recording.settings)
        # Calls to come are recorded with each request.
        told["dispatch"] = {**told.get("dispatch", {}), "learn_runs": False}
        told["instances"] = tuple(machines)
        told["telemetry"] = {"log_level": "warning"}
        settings = SettingsAsTold(**told)
        return new_service(machines, self._clock, settings, random.Random(1))

    def _machine(self, one: InstanceAt) -> VirtualInstance:
        pace = self._states.pace(one.name, self._shift)
        block_tokens = one.block_tokens or 16
        enough = one.max_running * one.context_tokens
        spec = WorkerSpec(
            cost=cost_of(pace),
            slots=one.max_running,
            kv_tokens=one.kv_blocks * block_tokens or enough,
            step_tokens=one.max_step_tokens,
            min_start_s=one.min_start_ms / 1000,
            noise=0.0,
        )
        return VirtualInstance(
            spec, virtual_card(one.model, spec, one.context_tokens, block_tokens)
        )

    def _first_ready(self) -> str:
        """An instance that took work when the asked request came, if there was one."""
        names, at = list(self._recording.instances), self._asked.arrived
        return next((name for name in names if self._states.at(name, at).is_ready), names[0])

    def _follow_instances(self) -> None:
        """Have the instances as they were at the beginning, and change as they did."""
        now, states = self._shift, self._recording.states
        first_at = min((state.at for state in states), default=0.0)
        for name in self._recording.instances:
            state = self._states.at(name, now)
            came_later = state.at > max(now, first_at)
            self._teach(name, state)
            self._become(structs.replace(state, is_ready=state.is_ready and not came_later))
        if self._change.has_one_more:
            self._teach(ADDED, self._states.at(self._first_ready(), now))
        for state in states:
            if state.at > now:
                self._loop.call_at(state.at - self._shift, self._become, state)

    def _become(self, state: InstanceAt) -> None:
        """Have an instance be as it was recorded."""
        address, registry = self._addresses[state.name], self._orchestrator.registry
        for lane in registry.instances[address].lanes:
            assert isinstance(lane, SimLane)
            if not state.is_reached:
                lane.lose()
            elif not lane.is_open:
                lane.start()
        if state.is_ready or not state.is_reached:
            registry.uncordon(address)
        else:
            registry.cordon(address)
        pace = self._states.pace(state.name, max(state.at, self._shift))
        self._service.workers[address].runner.cost = cost_of(pace)

    def _teach(self, name: str, state: InstanceAt) -> None:
        """Restore what the orchestrator had learnt of an instance's pace."""
        instance = self._orchestrator.registry.instances[self._addresses[name]]
        instance.concurrency.best_rows = state.most_rows
        assert instance.step_learner is not None, f"{name} is not up"
        if state.pace.steps:  # else it was a guess, here as there
            instance.step_learner.begin_with(learnt(state.pace))


class _Listener:
    """Notes a task's end."""

    def __init__(self, result: ReplayedRequest, shift: float, *, is_never_paused: bool) -> None:
        self.result = result
        self._shift = shift
        self._is_never_paused = is_never_paused

    def started(self, task: Task) -> None:
        if self._is_never_paused and isinstance(task.attempt, Attempt):
            task.attempt.pauses = _NEVER_AGAIN

    def tokens(self, task: Task, delta: Delta) -> None:
        """Ignore the tokens: the task counts them."""

    def ended(self, task: Task) -> None:
        assert task.ending is not None
        self.result.outcome = task.ending.outcome
        self.result.ended = task.marks.ended + self._shift
        self.result.tokens = task.completion_tokens
        self.result.pauses = task.pauses
