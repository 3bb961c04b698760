"""What a task will take, from what its instances and earlier answers have taught.

A forecast sets the times by which the queue orders a task (DL-8) and says whether its deadline is
certain to be missed (DL-7). *Certain* rests on the least work (``min_tokens``, or all of
``max_tokens`` under ``ignore_eos``; else the shortest of many answers), alone on the fastest
instance, at a pace that fewer than one job in a hundred has beaten. Nothing is certain until
enough jobs have taught it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from orchestrator.prediction import LengthLearner, Load, PaceLearner, PaceModel, Work
from orchestrator.task import Task
from worker.protocol import End, FinishReason, OnDeadline

USUAL_LENGTH, LONG_LENGTH = 0.5, 0.9
SHORTEST = 0.005
LEARNT_ANSWERS = 256
"""Answers before the shortest of them counts as the least that one can have."""
_MOST_TENANTS = 1024
_FIRST_GUESS_MS = 1000.0
_SMOOTHING = 0.05
_BAR = 0.25
"""How sure a try must be: 0 takes every second one that will miss, 1 hardly any. On the simulator
at 0.8 of capacity 0, 0.25 and 0.5 kept 96.9, 95.9 and 93.3 % of deadlines at 2.3, 2.0 and 1.1 %
waste; at twice the capacity, with equal goodput, waste was 0.9, 0.5 and 0.2 %."""
_LOOK_EVERY_S = 0.1
_DRIFT = 0.15


@dataclass(frozen=True, slots=True)
class Prospect:
    """What the instances that serve a model can do now."""

    models: tuple[PaceModel, ...]
    slots: int
    free: int
    min_start_ms: float
    """No worker starts with less left (DL-3)."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One task's, from now on, in ms. ``least_ms`` is never more than what is certain."""

    wait_ms: float
    prefill_ms: float
    decode_ms: float
    least_ms: float
    slow_ms: float
    bottleneck: str
    """What the least consists of: ``prefill``, ``decode`` or ``route``, the way to a worker."""

    @property
    def finish_ms(self) -> float:
        return self.wait_ms + self.prefill_ms + self.decode_ms

    @property
    def service_ms(self) -> float:
        return self.prefill_ms + self.decode_ms


class Lengths:
    """How long answers are, by model, and by tenant where it has had enough of them."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], LengthLearner] = OrderedDict()

    def of(self, model: str, tenant: str) -> LengthLearner:
        own = self._known.get((model, tenant))
        if own is not None and own.observed >= LEARNT_ANSWERS:
            return own
        return self._learner(model, "")

    def ended(self, task: Task, end: End) -> None:
        """Learn from an answer that came to its own end, and from one that a deadline cut."""
        if not end.completion_tokens:
            return
        for tenant in {"", task.job.tenant}:
            learner = self._learner(task.model, tenant)
            if end.code is None and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
                learner.finished(end.completion_tokens, task.sampling.max_tokens)
            elif end.reason is FinishReason.DEADLINE:
                learner.cut(end.completion_tokens, task.sampling.max_tokens)

    def _learner(self, model: str, tenant: str) -> LengthLearner:
        learner = self._known.get((model, tenant))
        if learner is None:
            learner = self._known[model, tenant] = LengthLearner()
            if len(self._known) > _MOST_TENANTS:
                self._known.popitem(last=False)
        self._known.move_to_end((model, tenant))
        return learner


class Forecaster:
    """Forecasts for tasks. ``prospect_of`` tells what serves a model."""

    def __init__(
        self, prospect_of: Callable[[str], Prospect], *, is_early: bool, doubts: bool = True
    ) -> None:
        """``is_early``: tasks that are certain to miss leave the queue before their deadline.

        Without ``doubts`` a task's chances do not change its place.
        """
        self._prospect_of = prospect_of
        self._is_early = is_early
        self._doubts = doubts
        self.lengths = Lengths()
        self._mean_ms = _FIRST_GUESS_MS
        self._looked_at = 0.0
        self._planned_ms = 0.0

    def forecast(self, task: Task, *, wait_ms: float = 0.0) -> Forecast:
        """What ``task`` takes once it has waited for ``wait_ms``."""
        prospect = self._prospect_of(task.model)
        return self._forecast(task, prospect, wait_ms)

    def plan(self, task: Task) -> Forecast:
        """Set the times by which the queue treats a task."""
        forecast = self.forecast(task)
        end = task.deadline.at
        task.service_ms = forecast.service_ms
        task.latest_start = end - forecast.slow_ms / 1000
        task.doubtful_from = task.latest_start if self._doubts and not task.probe else end
        task.last_chance = end
        if self._is_early and not task.probe:
            task.last_chance = end - forecast.least_ms / 1000
        return forecast

    def usual_tokens(self, task: Task) -> int:
        """How long its answer will usually be."""
        return self._answer(task)[0]

    def is_worth_it(
        self,
        task: Task,
        model: PaceModel,
        load: Load,
        left_ms: float,
        *,
        cached_tokens: int = 0,
    ) -> bool:
        """Whether a doubtful task should be sent to an instance: what else it does is known now.

        An idle one loses nothing by trying. On a busy one work that may well miss slows down
        others that would not; the bar lies between the usual and a slow job.
        """
        if not load.running + load.waiting:
            return True
        usual, _ = self._answer(task)
        work = Work(task.prompt_tokens, cached_tokens, usual)
        _, mid, high = model.ratios
        return model.finish_ms(work, load) * math.pow(high / mid, _BAR) <= left_ms

    def has_drifted(self, now: float) -> bool:
        """Whether the pace has changed so much since this was last true that plans are stale."""
        if now < self._looked_at + _LOOK_EVERY_S:
            return False
        self._looked_at = now
        models = self._prospect_of("").models
        # Without the share of others' prompts, which comes and goes.
        steps = [(m.base_ms + m.row_ms * m.slots) * m.ratios[1] for m in models]
        step_ms = min(steps, default=0.0)
        if abs(step_ms - self._planned_ms) <= _DRIFT * self._planned_ms:
            return False
        self._planned_ms = step_ms
        return True

    def drain_ms(self, model: str, service_ms: float) -> float:
        """How long the instances of ``model`` take for that much waiting service, and to begin."""
        prospect = self._prospect_of(model)
        if prospect.free and not service_ms:
            return 0.0
        slots = max(1, prospect.slots)
        release_ms = 0.0 if prospect.free else self._mean_ms / slots
        return release_ms + service_ms / slots

    def fit(self, task: Task, budget_ms: float) -> None:
        """Shrink a ``fit`` task's ``max_tokens`` to what ``budget_ms`` allows (DL-6)."""
        if task.job.on_deadline is not OnDeadline.FIT:
            return
        prospect = self._prospect_of(task.model)
        if not prospect.models:
            return
        work = Work(task.prompt_tokens)
        fits = max(model.tokens_within(budget_ms, work) for model in prospect.models)
        tokens = max(1, task.sampling.min_tokens, fits)
        if tokens < task.sampling.max_tokens:
            task.sampling = msgspec.structs.replace(task.sampling, max_tokens=tokens)
            task.fitted_tokens = tokens

    def ended(
        self, task: Task, end: End, pace: PaceLearner | None, basis: tuple[PaceModel, Load] | None
    ) -> None:
        """Learn from a job's end; ``basis`` is what its dispatch knew of the instance."""
        self.lengths.ended(task, end)
        if end.code is not None or end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        took_ms = end.wait_ms + end.prefill_ms + end.decode_ms
        self._mean_ms += (took_ms - self._mean_ms) * _SMOOTHING
        if pace is not None and basis is not None:
            work = Work(end.prompt_tokens, end.cached_tokens, max(1, end.completion_tokens))
            pace.finished(*basis, work, took_ms)

    def _least(self, task: Task) -> int:
        """Tokens without which the deadline cannot be kept, for certain."""
        sampling = task.sampling
        least = max(1, sampling.min_tokens)
        if task.job.on_deadline is not OnDeadline.ERROR:
            return least
        if sampling.ignore_eos and not sampling.stop:
            return sampling.max_tokens
        lengths = self.lengths.of(task.model, task.job.tenant)
        if lengths.observed >= LEARNT_ANSWERS:
            least = max(least, lengths.tokens(sampling.max_tokens, SHORTEST))
        return least

    def _answer(self, task: Task) -> tuple[int, int]:
        """Tokens of a usual and of a long answer."""
        sampling = task.sampling
        most = sampling.max_tokens
        if sampling.ignore_eos and not sampling.stop:
            return most, most
        lengths = self.lengths.of(task.model, task.job.tenant)
        usual = max(sampling.min_tokens, lengths.tokens(most, USUAL_LENGTH))
        return usual, max(usual, lengths.tokens(most, LONG_LENGTH))

    def _forecast(self, task: Task, prospect: Prospect, wait_ms: float) -> Forecast:
        least = self._least(task)
        usual, long = self._answer(task)
        if not prospect.models:
            return Forecast(wait_ms, 0.0, _FIRST_GUESS_MS, 0.0, 0.0, "route")
        prompt = task.prompt_tokens
        model = min(prospect.models, key=lambda m: m.service_ms(Work(prompt, 0, usual)))
        total_ms = model.service_ms(Work(prompt, 0, usual))
        prefill_ms = model.service_ms(Work(prompt, 0, 1))
        # What is cached, and where, is known only later: it costs nothing here.
        certain, start = Work(prompt, prompt - 1, least), Work(prompt, prompt - 1, 1)
        fastest = min(prospect.models, key=lambda m: m.least_ms(certain))
        least_ms = fastest.least_ms(certain)
        bottleneck = "prefill" if 2 * fastest.least_ms(start) > least_ms else "decode"
        if least_ms <= prospect.min_start_ms:
            least_ms, bottleneck = prospect.min_start_ms, "route"
        return Forecast(
            wait_ms=wait_ms,
            prefill_ms=prefill_ms,
            decode_ms=total_ms - prefill_ms,
            least_ms=least_ms,
            slow_ms=max(model.slow_ms(Work(prompt, 0, long)), least_ms),
            bottleneck=bottleneck,
        )
