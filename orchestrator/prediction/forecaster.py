"""Predicts a task's times from measured step times and the lengths of earlier answers.

A forecast says when a task will be done (clients get this time) and whether its deadline is certain
to be missed (DL-7). *Certain* uses the least work that the client itself states (``min_tokens``, or
all of ``max_tokens`` under ``ignore_eos``) and steps faster than any measured step. It uses no
learned length and no average.

A plan gives a task's urgency (``urgency``), which decides its place in the queue (DL-8).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from orchestrator.prediction.answer_length import (
    FIRST_MEAN,
    LONGEST,
    STATED,
    AnswerLengths,
    LengthKey,
)
from orchestrator.prediction.forecast import Asked, Machine, at_share
from orchestrator.prediction.step_learner import FIRST_STEP_MS
from orchestrator.prediction.step_model import LEAST_SPREAD, StepModel, Work
from orchestrator.prediction.urgency import SURE, Costs, Due, Urgency, urgency
from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from protocol import HEARTBEAT_S, End, FinishReason, OnDeadline

USUAL = 0.5
"""Share of answers, or of scenarios, that take no longer than the usual one."""
LONG = 0.9
"""The same for a long one: only a tenth take longer (DL-16)."""
MIN_WAIT_MS = 50.0
"""Shortest wait assumed for a task that is not chosen now, in milliseconds: a round of planning
(``dispatch.replan``)."""
_WAIT_PER_DRAIN = 2.0
"""Expected wait divided by the time to do all waiting work: more work arrives meanwhile. In the
simulator 0.5, 1 and 2 kept 0.95, 0.98 and 1.00 of the best at twice the capacity, and the same at
lower loads."""
_WAIT_OF_PAUSED = 4.0
"""The same for paused work. In the simulator 2 met 0.97 of this next to batch work, and with 1 jobs
of equal value swapped places."""
FIRST_GUESS_MS: Final = FIRST_MEAN * FIRST_STEP_MS
"""Assumed time of a request if nothing is known about the instances of its model."""
FIT_SHARE = 1 - LEAST_SPREAD
"""Share of the time budget that a ``fit`` answer should fill; the rest is for the model's error."""
ENDS_IN_TIME = (OnDeadline.FIT, OnDeadline.FINISH)
"""Deadline modes in which an answer that has started always ends in time, whatever its length."""
FIT_HEADROOM = 4
"""Factor by which a ``fit`` answer may exceed its fitted length if the machine gets faster or less
busy: it still ends at its deadline. KV is reserved for this length."""
PROMISED = 12.0
"""Extra urgency, as a logarithm, of work whose deadline the service promised."""
MUCH_SLOWER = 3.0
"""Ratio of step times to the fastest instance's from which an instance is ignored: it is another
machine, or others use it. In the simulator, while one of two workers is ten times as slow, 0.58
were met with the mean of both, more than 0.7 without the slow one."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The present capacity of the instances that serve a model."""

    models: tuple[StepModel, ...]
    slots: int
    free: int
    min_start_ms: float
    """Least remaining ms with which a worker starts a job (DL-3)."""
    part: float
    """This orchestrator's share of all slots; other orchestrators fill the rest."""
    names: tuple[str, ...] = ()
    """Addresses of the instances of ``models``, in the same order."""

    def least_ms(self, tokens: int) -> float:
        """Least ms that an answer of ``tokens`` takes, for certain. The prompt counts nothing: all
        of it may be cached, which is known only later."""
        least_ms = min((model.least_ms(tokens) for model in self.models), default=0.0)
        return max(least_ms, self.min_start_ms)

    @property
    def rows(self) -> int:
        """Average number of jobs on an instance after one more starts now, including that one."""
        count = max(1, len(self.models))
        return max(1, -(-(self.slots - self.free + count) // count))


class AfterLoad(NamedTuple):
    """Ms of a request after its model is loaded: the usual time, and one that is rarely
    exceeded."""

    usual_ms: float
    slow_ms: float


class _Serving(NamedTuple):
    """The capacity that serves a model and the costs of work there; None until measured.

    Work goes to the fastest instances first: ``machine`` and the fields after it leave out
    instances that take ``MUCH_SLOWER`` times as long.
    """

    capacity: Capacity
    fastest: StepModel | None
    costs: Costs | None
    machine: Machine | None
    names: frozenset[str]
    """Addresses of the instances that ``machine`` stands for."""
    prompt_token_ms: float
    step_tokens: int
    until: float

    @classmethod
    def of(cls, capacity: Capacity, until: float) -> "_Serving":
        rows, models = capacity.rows, capacity.models
        fastest = min(models, key=lambda m: m.step_ms(rows), default=None)
        if fastest is None:
            return cls(capacity, None, None, None, frozenset(), 0.0, 1, until)
        # Costs assume an engine with jobs in every slot, as under high load. Prompts are left out:
        # they count as work of their own jobs.
        share_ms = fastest.plain_step_ms(fastest.slots) / fastest.slots
        costs = Costs(
            fastest.prompt_token_ms,
            fastest.step_ms(rows),
            share_ms,
            start_ms=0.0,
            plain_token_ms=fastest.plain_step_ms(rows),
        )
        least_ms = min(pace.step_ms(1) for pace in models)
        each = zip(models, capacity.names or ("",) * len(models), strict=True)
        fast = [(p, name) for p, name in each if p.step_ms(1) < MUCH_SLOWER * least_ms]
        count, paces = len(fast), [pace for pace, _ in fast]
        machine = Machine(
            sum(pace.base_ms for pace in paces) / count,
            sum(pace.careful_row_ms for pace in paces) / count,
            max(1, sum(pace.slots for pace in paces)),
            count,
            sum(pace.spread for pace in paces) / count,
            paces[0].bends,
            usual=0,
            beside=0,
            context_token_ms=sum(pace.context_token_ms for pace in paces) / count,
        )
        return cls(
            capacity,
            fastest,
            costs,
            machine,
            frozenset(name for _, name in fast),
            sum(pace.prompt_token_ms for pace in paces) / count,
            min(pace.step_tokens for pace in paces),
            until,
        )


class Forecaster:
    """Makes forecasts and plans. ``capacity_of`` gives the capacity that serves a model."""

    def __init__(self, capacity_of: Callable[[str], Capacity]) -> None:
        self.capacity_of = capacity_of
        self.lengths = AnswerLengths()
        self._epoch = 0.0
        self._wait_ms: defaultdict[str, float] = defaultdict(lambda: MIN_WAIT_MS)
        self._serving: dict[str, _Serving] = {}
        self.known_speed: dict[str, StepModel] = {}
        """The step model of the fastest instance, by model that is or was served."""

    # ── plans: a place in the queue ──────────────────────────────────────────────────────────

    def begin_plans(self, waiting: Iterable[Task], now: float) -> None:
        """Update each model's load and expected wait. The caller then calls ``plan`` for each task.

        Ranks are comparable only if their plans were made at about the same time.
        """
        self._epoch = now
        work_ms: defaultdict[str, float] = defaultdict(float)
        for task in waiting:
            if not task.is_background:
                work_ms[task.model] += task.work_ms
        self._wait_ms.clear()
        for model, total_ms in work_ms.items():
            capacity = self.capacity_of(model)
            instances = max(1, len(capacity.models)) * capacity.part
            self._wait_ms[model] = max(MIN_WAIT_MS, _WAIT_PER_DRAIN * total_ms / instances)

    def plan(self, task: Task, now: float) -> None:
        found = self.urgency(task, now)
        task.work_ms = found.work_ms
        task.chance = found.chance
        # Work that cannot be in time gets only slots that no other work wants.
        task.is_background = task.is_unread or not (found.chance or task.refusal_sample)
        task.rank = self._rank(found, task, now)

    def urgency(self, task: Task, now: float) -> Urgency:
        return self._urgency(task, now, self._wait_ms[task.model])

    def urgency_of_running(self, task: Task, now: float) -> Urgency:
        """The urgency of continuing a running ``task``.

        A paused task waits longer than a new task would: equally urgent tasks arrive meanwhile.
        Without this factor every task with a little slack would be paused, until all are late.
        """
        return self._urgency(task, now, _WAIT_OF_PAUSED * self._wait_ms[task.model])

    def _urgency(self, task: Task, now: float, wait_ms: float) -> Urgency:
        costs = self._costs_of(task.model, now)
        if costs is not None and task.most_rows < math.inf:
            pace = self.known_speed[task.model]
            costs = replace(costs, token_ms=pace.plain_step_ms(int(task.most_rows)))
        if costs is None:  # nothing is measured yet: rank by deadline
            return Urgency(1.0, -task.share_ms(now) / MIN_WAIT_MS, 1.0)
        made = task.completion_tokens
        new = 0 if made else self._prompt_left(task, costs, now)
        due_at = task.parts.due_at(made + 1, task.marks.first_token)
        left = self.tokens_left(task)
        due = Due(_whole_ms(task, left, new, costs, now), 1000 * (due_at - now))
        # The calls of a run share its slack (``tasks.runs``): each may wait for its share of it.
        wait_ms *= 1 + task.calls_left
        if task.job.on_deadline in ENDS_IN_TIME:  # it fills the time that there is
            most = max(1.0, (due.whole_ms - new * costs.prompt_ms) / costs.token_ms / SURE)
            left = tuple(min(tokens, most) for tokens in left)
        found = urgency(left, new, due, costs, wait_ms)
        if not task.is_promised or not found.chance:
            return found
        # Other work gains more by running now: promised work runs as late as is safe.
        share = LONG if task.reserved_chance is None else task.reserved_chance
        long_ms = new * costs.prompt_ms + at_share(left, share) * costs.token_ms * SURE
        slack_ms = max(0.0, due.whole_ms - long_ms)
        return found._replace(log_urgency=PROMISED - slack_ms / MIN_WAIT_MS)

    @staticmethod
    def _prompt_left(task: Task, costs: Costs, now: float) -> float:
        """Remaining prompt tokens; workers do not report them before the first token."""
        if not task.prompt_ready_at:
            return task.new_prompt_tokens
        left = 1000 * (task.prompt_ready_at - now) / costs.prompt_ms
        return min(float(task.new_prompt_tokens), max(0.0, left))

    def _rank(self, found: Urgency, task: Task, now: float) -> float:
        """Rank in the queue relative to the last ``begin_plans``: the smallest leaves first."""
        if not found.chance:
            return task.deadline.at
        waited = 1000 * (now - self._epoch) / self._wait_ms[task.model]
        return waited - found.log_urgency

    def used_ms(self, task: Task, now: float) -> float:
        """Engine ms that ``task`` has used so far, in the same measure as ``work_ms``."""
        costs = self._costs_of(task.model, now)
        if costs is None or not task.completion_tokens:
            return 0.0
        prompt_ms = task.new_prompt_tokens * costs.prompt_ms
        return prompt_ms + task.completion_tokens * costs.token_work_ms

    def _costs_of(self, model: str, now: float) -> Costs | None:
        """Costs at the present number of jobs; None until a step has been measured."""
        return self._serving_of(model, now).costs

    def _serving_of(self, model: str, now: float) -> _Serving:
        """Capacity and costs, cached briefly: every plan needs them, and reading is expensive."""
        known = self._serving.get(model)
        if known is None or now >= known.until:
            capacity = self.capacity_of(model)
            known = self._serving[model] = _Serving.of(capacity, now + HEARTBEAT_S)
            if known.fastest is not None:
                self.known_speed[model] = known.fastest
        return known

    # ── inputs of a forecast ─────────────────────────────────────────────────────────────────

    def machine(self, model: str, now: float) -> Machine | None:
        """The machine that serves ``model``; None if no instance does."""
        return self._serving_of(model, now).machine

    def fast_instances(self, model: str, now: float) -> frozenset[str]:
        """Addresses of the instances that ``machine`` stands for."""
        return self._serving_of(model, now).names

    def knows(self, model: str, now: float) -> bool:
        """Whether enough steps of ``model`` were measured, during work or at load, to refuse
        tasks."""
        paces = self._serving_of(model, now).capacity.models
        return any(pace.known or pace.is_foreseen for pace in paces)

    def asked(self, task: Task, now: float) -> Asked:
        """``task`` as input of a forecast. An instance must serve its model."""
        serving = self._serving_of(task.model, now)
        made, parts = task.completion_tokens, task.parts
        new = self._prompt_left(task, serving.costs, now) if serving.costs and not made else 0.0
        # A learned number of calls, unlike a stated one, is rarely right: it refuses no task.
        left_ms = task.deadline.left_ms(now) if task.job.calls_left is None else task.share_ms(now)
        ends_cleanly = task.job.on_deadline is not OnDeadline.ERROR
        first_ms = 1000 * (parts.due_at(made + 1, task.marks.first_token) - now)
        return Asked(
            key=crc32(task.id.encode()),
            left=self.tokens_left(task),
            prompt_ms=new * serving.prompt_token_ms,
            prompt_steps=0 if made else math.ceil(new / serving.step_tokens),
            stop_ms=max(0.0, task.deadline.left_ms(now)),
            whole_ms=math.inf if ends_cleanly else left_ms,
            first_ms=min(first_ms, left_ms) if ends_cleanly and not made else first_ms,
            gap_ms=1000 * parts.token_gap_s,
            context_tokens=task.prompt_tokens + made,
        )

    # ── lengths ──────────────────────────────────────────────────────────────────────────────

    def usual_tokens(self, task: Task) -> int:
        """The answer's usual total length in tokens: half of such answers are longer."""
        return task.completion_tokens + math.ceil(at_share(self.tokens_left(task), USUAL))

    def most_tokens_left(self, task: Task) -> int:
        """The answer's remaining tokens, exceeded by only a tenth of such answers."""
        return math.ceil(at_share(self.tokens_left(task), LONG))

    def tokens_left(self, task: Task) -> tuple[float, ...]:
        """Equally likely numbers of remaining tokens of the answer, in rising order."""
        made, cap = task.completion_tokens, task.sampling.max_tokens
        is_stated = task.sampling.length_is_stated
        curve = STATED if is_stated else self.lengths.curve(length_key(task))
        left = curve.left(made, max(made + 1, cap))
        least = task.sampling.min_tokens - made
        return left if left[0] >= least else tuple(max(tokens, least) for tokens in left)

    # ── forecasts: for clients ──────────────────────────────────────────────────────────────

    def least_ms(self, task: Task) -> float:
        capacity = self.capacity_of(task.model)
        return capacity.least_ms(least_tokens(task)) if capacity.models else 0.0

    def after_load(self, job: Job, prompt_tokens: int, rows: int) -> AfterLoad:
        """Predict the ms of ``job`` among ``rows`` jobs after its model, which is not loaded, is
        loaded.

        Uses the speed of the model when it was last served, or else that of the slowest model
        served now.
        """
        now = self.capacity_of("")
        model = self.known_speed.get(job.model) or max(
            now.models, key=lambda one: one.step_ms(rows), default=None
        )
        if model is None:
            return AfterLoad(FIRST_GUESS_MS, FIRST_GUESS_MS)
        cap = job.max_tokens or job.default_max_tokens or LONGEST
        stated_ms = None if job.deadline.is_default else 1000 * (job.deadline.at - job.arrived)
        key = LengthKey(job.model, job.tenant, cap, stated_ms, job.session_id)
        is_stated = job.max_tokens is not None and job.sampling.length_is_stated
        left = (STATED if is_stated else self.lengths.curve(key)).left(0, cap)
        usual, long = (math.ceil(at_share(left, share)) for share in (USUAL, LONG))
        usual_ms = model.service_ms(Work(prompt_tokens, 0, usual), rows)
        more = min(model.slots, 2 * rows + 1)
        slow_ms = model.service_ms(Work(prompt_tokens, 0, long), more) * model.slow
        return AfterLoad(max(usual_ms, now.min_start_ms), max(usual_ms, slow_ms, now.min_start_ms))

    def fit(self, task: Task, budget_ms: float) -> None:
        """Set the usual length of a ``fit`` task's answer for ``budget_ms``, and bound it (DL-6).

        The bound is generous: the deadline ends the answer, so a pace that was measured on a busier
        machine does not cut it. In a run with later calls each call must keep to its share of the
        time, so the usual length is the bound.
        """
        tokens = self.fitting_tokens(task, budget_ms)
        task.fitted_tokens = None
        if tokens is not None and tokens < task.sampling.max_tokens:
            task.fitted_tokens = tokens
            most = tokens if task.job.calls_left else FIT_HEADROOM * tokens
            # Until steps were measured the pace is a guess.
            is_measured = any(pace.steps for pace in self.capacity_of(task.model).models)
            if most < task.sampling.max_tokens and is_measured:
                task.sampling = msgspec.structs.replace(task.sampling, max_tokens=most)

    def fitting_tokens(self, task: Task, budget_ms: float) -> int | None:
        """Tokens that a ``fit`` task's answer may have; None for other tasks, or if unknown."""
        if task.job.on_deadline is not OnDeadline.FIT:
            return None
        capacity = self.capacity_of(task.model)
        if not capacity.models:
            return None
        work = Work(task.prompt_tokens, task.likely_cached, 1)
        room_ms = FIT_SHARE * task.share_of(budget_ms)
        fits = max(model.tokens_within(room_ms, work, capacity.rows) for model in capacity.models)
        return max(1, task.sampling.min_tokens, fits)

    # ── learning ─────────────────────────────────────────────────────────────────────────────

    def ended(self, task: Task, end: End) -> None:
        """Learn from a job's end."""
        if end.completion_tokens and not task.sampling.length_is_stated:
            finished = end.code is None and end.reason is FinishReason.STOP
            self.lengths.answered(length_key(task), end.completion_tokens, finished=finished)


def length_key(task: Task) -> LengthKey:
    job = task.job
    cap = task.sampling.max_tokens if task.fitted_tokens is None else job.max_tokens or 0
    stated_ms = None if job.deadline.is_default else 1000 * (job.deadline.at - job.arrived)
    session, prompt_tokens, kind = job.session_id, task.prompt_tokens, task.prompt_kind
    return LengthKey(task.model, job.tenant, cap, stated_ms, session, prompt_tokens, kind)


def _whole_ms(
    task: Task, left: Sequence[float], new_prompt_tokens: float, costs: Costs, now: float
) -> float:
    """Ms from ``now`` until the last token of ``task`` is due, assuming usual lengths.

    The later calls of a run need time: each about as much as this whole call, and the time between
    calls. Their number may be an estimate: their time alone never makes this call late, it only
    takes its slack.
    """
    left_ms = task.deadline.left_ms(now)
    if not task.calls_left:
        return left_ms
    usual, long = at_share(left, USUAL), at_share(left, LONG)
    call_ms = task.new_prompt_tokens * costs.prompt_ms
    call_ms += (task.completion_tokens + usual) * costs.token_ms
    rest_ms = task.between_calls_ms + task.calls_left * call_ms
    own_ms = SURE * (new_prompt_tokens * costs.prompt_ms + long * costs.token_ms)
    return max(left_ms - rest_ms, min(left_ms, own_ms))


def least_tokens(task: Task) -> int:
    """Least number of tokens of an answer that the client accepts."""
    if task.job.on_deadline is OnDeadline.ERROR and task.sampling.length_is_stated:
        return task.sampling.max_tokens
    return max(1, task.sampling.min_tokens)
