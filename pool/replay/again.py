"""A recording once more: its requests as arrivals, its instances as virtual ones, and what becomes
of each request, with nothing changed or with one thing.

A request's answer is as long as it was. Where something cut it, it is as long as half of such
answers are that get so far, by what was known when the request came.
"""

import asyncio
import math
import random
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from msgspec import structs
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from orchestrator.errors import TidegateError
from orchestrator.prediction.answer_length import STATED, AnswerLengths, LengthCurve, LengthKey
from orchestrator.prediction.forecaster import length_key
from orchestrator.prediction.step_learner import LEARNT_STEPS, StepsLearnt
from orchestrator.prediction.step_model import StepModel
from orchestrator.recording.facts import InstanceAt, InstanceFacts, RecordedRequest, Recording
from orchestrator.service import Orchestrator, Reading
from orchestrator.settings import Settings
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Parts
from orchestrator.tasks.job import Api, Job, PlacementConstraint
from orchestrator.tasks.task import Task
from pool.replay.lane import SimLane
from pool.replay.loop import VirtualClock, VirtualLoop, run_quietly
from pool.replay.service import VirtualInstance, VirtualService, new_service, virtual_card
from pool.replay.worker import WorkerSpec
from worker.protocol import Delta, OnDeadline, Outcome, Sampling
from worker.runner.synthetic import StepCost

BEFORE_S: Final = 1.0
"""Seconds of a replay before its first request, in which the instances come up."""
LINGER_S: Final = 0.2
"""Seconds after its deadline in which the asked request's end is reported."""
LATE_S: Final = 2.0
"""Seconds by which requests may end later than recorded in a replay without a change."""
ADDED: Final = "one more"
"""Name of an instance that is added."""
_LOOK_EVERY_S = 0.25
_FIRST_OWN_ID = 2**18
_LEARNT_WINDOWS = 100
_LEARNT_VARIANCE = 0.02**2


class OutOfTime(Exception):
    """The CPU time that replays may take is used up."""


@dataclass(frozen=True, slots=True)
class OneThing:
    """What is not as it was recorded: one of these, or nothing."""

    is_let_in: bool = False
    is_never_paused: bool = False
    has_one_more: bool = False
    later_s: float = 0.0
    is_alone: bool = False


NOTHING: Final = OneThing()


@dataclass(slots=True)
class ReplayedRequest:
    """What became of a request in a replay; ``ended`` is on the recording's clock."""

    outcome: Outcome | None = None
    ended: float = math.inf
    tokens: int = 0
    pauses: int = 0


class _SettingsAsTold(Settings):
    """Settings that no environment and no file has a say in."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class LengthsAsKnown(AnswerLengths):
    """Lengths of answers as they were expected when each request came; nothing is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[LengthKey, LengthCurve] = {}
        self._curves: dict[tuple[float, ...], LengthCurve] = {}

    def tell(self, task: Task, left: tuple[float, ...]) -> None:
        """Note what was expected of a task's answer."""
        if left:
            curve = self._curves.get(left)
            if curve is None:
                curve = self._curves[left] = LengthCurve.through(left)
            self._told[length_key(task)] = curve

    def curve(self, key: LengthKey) -> LengthCurve:
        return self._told.get(key) or super().curve(key)

    def answered(self, key: LengthKey, tokens: int, *, finished: bool) -> None:
        """Ignore it: what was expected of later requests is recorded."""


@dataclass(slots=True)
class Replayer:
    """Replays one recording under the same settings, as often as there is CPU time for."""

    recording: Recording
    settings: Mapping[str, Any]
    ends_at: float = math.inf
    """When the CPU time is used up, by this process's own clock (``time.process_time``)."""
    _lengths: dict[str, int] = field(default_factory=dict)

    def length(self, request: RecordedRequest) -> int:
        """Tokens of a request's answer in the replay, at most its ``max_tokens``."""
        known = self._lengths.get(request.id)
        if known is None:
            known = self._lengths[request.id] = length_of(request)
        return known

    def run(self, change: OneThing = NOTHING) -> dict[str, ReplayedRequest]:
        """What becomes of the requests, by id. With a change, only until the asked one has ended.
        Raises ``OutOfTime``."""
        return run_quietly(lambda loop: _Run(self, change, loop).go())


class _Run:
    """One replay."""

    def __init__(self, replayer: Replayer, change: OneThing, loop: VirtualLoop) -> None:
        self._replayer = replayer
        self._recording = replayer.recording
        self._asked = self._recording.request
        self._change = change
        self._loop = loop
        self._clock = VirtualClock(loop)
        self._shift = self._requests[0].arrived - BEFORE_S
        names = [one.name for one in self._recording.instances]
        self._addresses = {name: f"i{at}:1" for at, name in enumerate([*names, ADDED])}
        """Addresses in the replay, by name: some instances are not named by theirs."""
        self._service = self._new_service()
        self._orchestrator: Orchestrator = self._service.parts.orchestrator
        self._lengths = LengthsAsKnown()
        self._results: dict[str, ReplayedRequest] = {}
        self._submitting: set[asyncio.Task[None]] = set()

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
        for request in self._requests:
            self._loop.call_at(request.arrived - self._shift, self._arrive, request)
        is_whole = self._change is NOTHING
        awaited = [one.id for one in self._recording.compared] if is_whole else [self._asked.id]
        until = max(self._asked.deadline_at, self._asked.ended) + self._change.later_s
        until += (LATE_S if is_whole else LINGER_S) - self._shift
        try:
            while (left_s := until - clock.now()) > 1e-6 and not self._have_ended(awaited):
                if time.process_time() > self._replayer.ends_at:
                    raise OutOfTime
                await asyncio.sleep(min(_LOOK_EVERY_S, left_s))
            # What has not ended is about to be ended by the drain.
            return {name: replace(result) for name, result in self._results.items()}
        finally:
            await parts.lifecycle.drain(0.0)
            await parts.lifecycle.close()

    def _have_ended(self, names: Sequence[str]) -> bool:
        results = self._results
        return all(name in results and results[name].outcome is not None for name in names)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def _arrive(self, request: RecordedRequest) -> None:
        task = asyncio.ensure_future(self._submit(request))
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)

    async def _submit(self, request: RecordedRequest) -> None:
        result = self._results[request.id] = ReplayedRequest()
        try:
            job = self._job(request)
            encoder = self._orchestrator.models.resolve(request.model)
            ids = self._prompt(request)
            task = await self._orchestrator.prepare(job, ids, Reading(encoder, ids, (), ()))
            task.calls_left, task.between_calls_ms = request.calls_left, request.between_calls_ms
            task.is_promised = request.is_promised
            task.reserved_chance = request.reserved_chance
            self._lengths.tell(task, request.left)
            if request is self._asked and self._change.is_never_paused:
                self._service.parts.pausing.never_paused = task
            self._orchestrator.offer(task, [_Result(result, self._shift)])
        except TidegateError:
            result.outcome, result.ended = Outcome.REFUSED, self._clock.now() + self._shift
            return
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
            arrived=self._clock.now(),
            on_deadline=OnDeadline.FIT if finishes else request.on_deadline,
            priority=request.priority,
            tenant=request.tenant,
            placement=PlacementConstraint(
                request.placement,
                tuple(self._addresses.get(name, name) for name in request.placed_on),
            ),
        )

    def _parts(self, request: RecordedRequest) -> Parts:
        if request.first_token_at == request.token_gap_s == request.cut_at == math.inf:
            return NO_PARTS
        later_s = self._change.later_s if request.id == self._asked.id else 0.0
        moved = later_s - self._shift
        return Parts(request.first_token_at + moved, request.token_gap_s, request.cut_at + moved)

    def _prompt(self, request: RecordedRequest) -> tuple[int, ...]:
        """Token ids of the part of the prompt that was computed; the last is the answer's length
        (``worker``)."""
        own = _FIRST_OWN_ID + hash(request.id) % _FIRST_OWN_ID
        new = max(1, request.prompt_tokens - request.cached_tokens)
        return (own,) * (new - 1) + (self._replayer.length(request),)

    # ── instances ────────────────────────────────────────────────────────────────────────────

    def _new_service(self) -> VirtualService:
        facts = {one.name: one for one in self._recording.instances}
        machines = {self._addresses[name]: self._machine(one) for name, one in facts.items()}
        if self._change.has_one_more and facts:
            machines[self._addresses[ADDED]] = self._machine(facts[self._first_ready()])
        told = dict(self._replayer.settings)
        # Calls to come are recorded with each request.
        told["dispatch"] = {**told.get("dispatch", {}), "learn_runs": False}
        told["instances"] = tuple(machines)
        told["telemetry"] = {"log_level": "warning", "recorded_requests": 0}
        settings = _SettingsAsTold(**told)
        return new_service(machines, self._clock, settings, random.Random(1))

    def _machine(self, facts: InstanceFacts) -> VirtualInstance:
        pace = self._measured_pace(facts.name, self._shift)
        block_tokens = facts.block_tokens or 16
        enough = facts.max_running * facts.context_tokens
        spec = WorkerSpec(
            cost=_cost(pace),
            slots=facts.max_running,
            kv_tokens=facts.kv_blocks * block_tokens or enough,
            step_tokens=facts.max_step_tokens,
            min_start_s=facts.min_start_ms / 1000,
            noise=0.0,
        )
        return VirtualInstance(
            spec, virtual_card(facts.model, spec, facts.context_tokens, block_tokens)
        )

    def _state_at(self, name: str, at: float) -> InstanceAt:
        """The last recorded state of an instance before a time, else the first after it."""
        states = [state for state in self._recording.states if state.name == name]
        number = bisect_right([state.at for state in states], at)
        return states[max(0, number - 1)]

    def _measured_pace(self, name: str, at: float) -> StepModel:
        """The pace of an instance at a time: what was known of it then, or, where that was a guess,
        what was known once it had been measured."""
        states = [state for state in self._recording.states if state.name == name]
        measured = [state for state in states if state.pace.steps >= LEARNT_STEPS] or states
        number = bisect_right([state.at for state in measured], at)
        return measured[max(0, number - 1)].pace

    def _first_ready(self) -> str:
        """An instance that took work when the asked request came, if there was one."""
        names = [one.name for one in self._recording.instances]
        at = self._asked.arrived
        return next((name for name in names if self._state_at(name, at).is_ready), names[0])

    def _follow_instances(self) -> None:
        """Have the instances as they were at the beginning, and change as they did."""
        now, states = self._shift, self._recording.states
        first_at = min((state.at for state in states), default=0.0)
        for one in self._recording.instances:
            state = self._state_at(one.name, now)
            came_later = state.at > max(now, first_at)
            self._teach(one.name, state)
            self._become(structs.replace(state, is_ready=state.is_ready and not came_later))
        if self._change.has_one_more and self._recording.instances:
            self._teach(ADDED, self._state_at(self._first_ready(), now))
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
        pace = self._measured_pace(state.name, max(state.at, self._shift))
        self._service.workers[address].runner.cost = _cost(pace)

    def _teach(self, name: str, state: InstanceAt) -> None:
        """Restore what the orchestrator had learnt of an instance's pace."""
        instance = self._orchestrator.registry.instances[self._addresses[name]]
        instance.concurrency.best_rows = state.most_rows
        assert instance.step_learner is not None, f"{name} is not up"
        if state.pace.steps:  # else it was a guess, here as there
            instance.step_learner.begin_with(_learnt(state.pace))


class _Result:
    """Notes a task's end."""

    def __init__(self, result: ReplayedRequest, shift: float) -> None:
        self._result = result
        self._shift = shift

    def started(self, task: Task) -> None:
        """Ignore the start."""

    def tokens(self, task: Task, delta: Delta) -> None:
        """Ignore the tokens: the task counts them."""

    def ended(self, task: Task) -> None:
        assert task.ending is not None
        self._result.outcome = task.ending.outcome
        self._result.ended = task.marks.ended + self._shift
        self._result.tokens = task.completion_tokens
        self._result.pauses = task.pauses


def length_of(request: RecordedRequest) -> int:
    """Tokens of a request's answer: as many as it had; where something cut it, as half of such
    answers have that get so far."""
    known = request.length
    if known is not None:
        return max(1, known)
    most = request.max_tokens
    curve = LengthCurve.through(request.left) if request.left else STATED
    made = min(request.tokens, most - 1)
    return max(1, min(most, made + round(curve.quantile(0.5, made, most))))


def _cost(pace: StepModel) -> StepCost:
    return StepCost(pace.base_ms / 1000, pace.row_ms / 1000, pace.prompt_token_ms / 1000)


def _learnt(pace: StepModel) -> StepsLearnt:
    """What a learner knows whose model is ``pace``."""
    # Eleven values on a line, of which two given quantiles are those of the model.
    log_mid, log_high = math.log(pace.mid), math.log(pace.high)
    step = (log_high - log_mid) / 4.8
    return StepsLearnt(
        windows=_LEARNT_WINDOWS,
        coefficients=(pace.base_ms, pace.row_ms, pace.prompt_token_ms),
        variances=(_LEARNT_VARIANCE, _LEARNT_VARIANCE, _LEARNT_VARIANCE),
        prompts_per_step=pace.prompt_tokens_per_step,
        fastest_ms=pace.fastest_ms if pace.known else math.inf,
        bound_steps=LEARNT_STEPS if pace.known else 0,
        steps_at_pace=pace.steps,
        rates=(pace.tokens_per_s,) if pace.tokens_per_s else (),
        ratios=tuple(log_mid + step * (number - 5) for number in range(11)),
        jobs=pace.jobs,
    )
