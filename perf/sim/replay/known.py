"""What is known of a recording before it is replayed: settings, lengths of answers, paces."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from pydantic_settings import PydanticBaseSettingsSource

from orchestrator.prediction.answer_length import (
    QUANTILES,
    STATED,
    AnswerLengths,
    LengthCurve,
    LengthKey,
)
from orchestrator.prediction.forecaster import length_key
from orchestrator.prediction.step_learner import LEARNT_STEPS, StepsLearnt
from orchestrator.prediction.step_model import StepModel
from orchestrator.settings import Settings
from orchestrator.tasks.task import Task
from perf.sim.replay.recording import InstanceAt, RecordedRequest
from worker.runner.synthetic import StepCost

_LEARNT_WINDOWS: Final = 100
_LEARNT_VARIANCE: Final = 0.02**2


class SettingsAsTold(Settings):
    """Settings that no environment and no file has a say in."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: object, init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class CurveAsTold(LengthCurve):
    """A distribution of which nothing is known but equally likely lengths, in rising order."""

    __slots__ = ("_lengths",)

    def __init__(self, lengths: Sequence[float]) -> None:
        super().__init__((1.0,))
        self._lengths = lengths

    def _left(self, made: int, cap: int) -> tuple[float, ...]:
        beyond = [length for length in self._lengths if length > made] or [float(cap)]
        chosen = (beyond[number * len(beyond) // QUANTILES] for number in range(QUANTILES))
        return tuple(max(1.0, min(length, cap) - made) for length in chosen)


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
                curve = self._curves[left] = CurveAsTold(left)
            self._told[length_key(task)] = curve

    def curve(self, key: LengthKey) -> LengthCurve:
        return self._told.get(key) or super().curve(key)

    def answered(self, key: LengthKey, tokens: int, *, finished: bool) -> None:
        """Ignore it: what was expected of later requests is recorded."""


class StatesAsRecorded:
    """The recorded states of instances, by name."""

    def __init__(self, states: Sequence[InstanceAt]) -> None:
        """``states``: of all instances, in the order of time."""
        self._states: dict[str, list[InstanceAt]] = {}
        for state in states:
            self._states.setdefault(state.name, []).append(state)

    def at(self, name: str, at: float) -> InstanceAt:
        """The last state of an instance before a time, else the first after it."""
        return self._states[name][self._number(name, at)]

    def pace(self, name: str, at: float) -> StepModel:
        """The pace of an instance at a time, by all that was recorded.

        While an instance keeps its speed, what is known of it only gets better: how a step's time
        splits into its base, its rows and its prompts is taken from the last state at that speed.
        """
        states = self._states[name][self._number(name, at) :]
        for before, after in pairwise(states):
            is_other_speed = after.pace.steps < before.pace.steps
            if is_other_speed and before.pace.steps >= LEARNT_STEPS:
                return before.pace
        return states[-1].pace

    def _number(self, name: str, at: float) -> int:
        return max(0, bisect_right(self._states[name], at, key=lambda state: state.at) - 1)


def length_of(request: RecordedRequest) -> int:
    """Tokens of a request's answer: as many as it had; where something cut it, as half of such
    answers have that get so far."""
    known = request.length
    if known is not None:
        return max(1, known)
    most = request.max_tokens
    curve = CurveAsTold(request.left) if request.left else STATED
    made = min(request.tokens, most - 1)
    return max(1, min(most, made + round(curve.quantile(0.5, made, most))))


def cost_of(pace: StepModel) -> StepCost:
    return StepCost(pace.base_ms / 1000, pace.row_ms / 1000, pace.prompt_token_ms / 1000)


def learnt(pace: StepModel) -> StepsLearnt:
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
