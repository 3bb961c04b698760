"""Second tries (OR-10): which jobs get one, when, and what is sent.

Before the first token a job that its instance lost or would not take goes back to the queue. After
it, a text can go on elsewhere from where it stopped: the prompt and what was generated so far are
sent as the prompt. A worker's random numbers come from seed and position in the text, and its
text stage decodes what it generates as the continuation of a prompt, so nothing is lost, repeated
or drawn differently.

Both cost work a second time, and are not attempted when the deadline could not be kept any more
(DL-12). Those that have not begun draw on a budget, a share of what is offered, lest a fault that
follows the requests keeps the service busy. A text that has begun does not: there are no more of
them than an instance has slots, its client has read half of it, and it waits for a slot by its
urgency like everybody.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.prediction import Work
from orchestrator.prediction.forecaster import Capacity
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.tasks.task import Task
from orchestrator.tasks.transcript import Trail, is_continuable
from worker.protocol import Code, FinishReason, Sampling

RETRYABLE = frozenset({Code.INSTANCE_LOST, Code.DRAINING, Code.NO_CAPACITY, Code.QUEUE_FULL})
"""What says something about the instance, and nothing about the request."""


class RetryDenied(StrEnum):
    """Why a job got no second try."""

    ATTEMPTS = "attempts"
    NOWHERE = "nowhere"
    BUDGET = "budget"
    DEADLINE = "deadline"
    TEXT = "text"
    """It has begun, and cannot be continued exactly."""


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """What an operator allows."""

    share: float = 0.1
    """Second tries of what had not begun over requests offered, in the long run; with 0 there are
    none of what had begun either."""
    burst: float = 10.0
    attempts: int = 3
    """Sent so often in all."""
    backoff_s: float = 0.025
    """The first pause, doubled each time; each is drawn from half to one and a half of that."""
    backoff_most_s: float = 1.0
    floor_ms: float = 10.0


class RetryBudget:
    """A token bucket that requests fill and second tries empty."""

    def __init__(self, share: float, burst: float, *, is_full: bool = True) -> None:
        self._share = share
        self._burst = burst if share else 0.0
        self._tokens = self._burst if is_full else 0.0

    def offered(self) -> None:
        self._tokens = min(self._burst, self._tokens + self._share)

    @property
    def is_empty(self) -> bool:
        return self._tokens < 1.0

    def spend(self) -> None:
        assert not self.is_empty
        self._tokens -= 1.0


@dataclass(frozen=True, slots=True)
class Again:
    """A second try, after a pause."""

    delay_s: float


def rest_of(task: Task) -> tuple[list[int], Sampling]:
    """What to send for a task: prompt and parameters, less what it has generated already."""
    if task.trail is None or not task.trail.ids:
        return list(task.token_ids), task.sampling
    made = len(task.trail.ids)
    rest = msgspec.structs.replace(
        task.sampling,
        max_tokens=task.sampling.max_tokens - made,
        min_tokens=max(0, task.sampling.min_tokens - made),
    )
    return [*task.token_ids, *task.trail.ids], rest


class Retrier:
    """Decides on second tries. ``granted`` and ``denied`` count them."""

    def __init__(
        self,
        registry: Registry,
        prospect_of: Callable[[str], Capacity],
        rng: random.Random,
        rules: RetryConfig,
    ) -> None:
        self._registry = registry
        self._prospect_of = prospect_of
        self._rng = rng
        self._rules = rules
        self.budget = RetryBudget(rules.share, rules.burst)
        self.granted: Counter[str] = Counter()
        self.denied: Counter[RetryDenied] = Counter()

    def trail_for(self, task: Task) -> Trail | None:
        """Where to keep what a task generates; None if that could not help it."""
        if len(self._registry.instances) < 2 or not is_continuable(task.sampling):
            return None
        return Trail()

    def finish_of(self, task: Task, failed: str) -> FinishReason | None:
        """How a text ended that lacks nothing but its worker's last word; None for any other."""
        lost = self._registry.instances.get(failed)
        if lost is None or lost.encoder is None or not self._is_whole(task, lost.encoder):
            return None
        assert task.trail is not None
        sampling, ids = task.sampling, task.trail.ids
        if ids and ids[-1] in lost.encoder.card.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= sampling.max_tokens else None

    def again(
        self, task: Task, failed: str, now: float, *, elsewhere: bool = False
    ) -> Again | None:
        """Whether a task that the instance ``failed`` did not finish is sent once more.

        With ``elsewhere`` only to another instance, and at once. A text goes on at once as well.
        """
        ready = [
            instance
            for instance in self._registry
            if (instance.ready or instance.is_reopening)
            and instance.encoder is not None
            and instance.encoder.card.model == task.model
            and instance.encoder.vocabulary == task.vocabulary
            and task.job.placement.allows(instance.address)
        ]
        if elsewhere:
            ready = [instance for instance in ready if instance.address != failed]
        delay_s = 0.0 if elsewhere or task.completion_tokens else self._backoff_s(task.attempts)
        denial = self._denial(task, failed, ready, now + delay_s)
        if denial is not None:
            self.denied[denial] += not elsewhere  # what is not lost yet is asked for again
            return None
        if not task.completion_tokens and not self._reopens(failed):
            self.budget.spend()
        self.granted["continue" if task.completion_tokens else "retry"] += 1
        return Again(delay_s)

    def _denial(
        self, task: Task, failed: str, ready: Sequence[Instance], starts_at: float
    ) -> RetryDenied | None:
        if task.completion_tokens and not self._text_can_go_on(task, failed, ready):
            return RetryDenied.TEXT
        if not ready:
            return RetryDenied.NOWHERE
        if task.attempts + 1 >= self._rules.attempts:
            return RetryDenied.ATTEMPTS
        if task.deadline.left_ms(starts_at) <= self._least_ms(task):
            return RetryDenied.DEADLINE
        if task.completion_tokens and self._rules.share:
            return None
        if self._reopens(failed) and self._rules.share:
            return None
        return RetryDenied.BUDGET if self.budget.is_empty else None

    def _reopens(self, failed: str) -> bool:
        """Whether jobs were lost because a model was loaded anew: no fault that follows them."""
        lost = self._registry.instances.get(failed)
        return lost is not None and lost.is_reopening

    def _text_can_go_on(self, task: Task, failed: str, ready: Sequence[Instance]) -> bool:
        """Whether all that was generated is known, and all that are ready have the same weights."""
        lost = self._registry.instances.get(failed)
        if lost is None or lost.encoder is None or not self._is_whole(task, lost.encoder):
            return False
        digest = lost.encoder.card.model_digest
        return all(i.card is not None and i.card.model_digest == digest for i in ready)

    def _is_whole(self, task: Task, encoder: PromptEncoder) -> bool:
        """Whether no id and no half character of what the worker made was lost with it."""
        trail = task.trail
        return (
            trail is not None
            and len(trail.ids) == task.completion_tokens
            and encoder.text_of(trail.ids) == trail.text()
        )

    def _least_ms(self, task: Task) -> float:
        """What is left of the task takes at the very least, as far as that is known."""
        token_ids, sampling = rest_of(task)
        tokens = sampling.max_tokens if sampling.ignore_eos else max(1, sampling.min_tokens)
        # All of the prompt may be cached where it goes.
        work = Work(len(token_ids), len(token_ids) - 1, tokens)
        prospect = self._prospect_of(task.model)
        least_ms = min((model.least_ms(work) for model in prospect.models), default=0.0)
        return max(least_ms, prospect.min_start_ms, self._rules.floor_ms)

    def _backoff_s(self, attempts: int) -> float:
        pause_s = min(self._rules.backoff_s * 2.0**attempts, self._rules.backoff_most_s)
        return pause_s * self._rng.uniform(0.5, 1.5)
