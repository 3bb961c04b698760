"""Decides which jobs are retried, and when (OR-10).

Before its first token a job that its instance lost or refused goes back to the queue. After it, the
text can continue on another instance (``resume``).

Both repeat work, and are not attempted if the deadline can no longer be kept (DL-12). Retries of
jobs without a token use a budget, a share of submitted requests, so that a fault that follows the
requests cannot keep the service busy. Partial texts need no budget: an instance has at most as many
as slots, their clients have read half of them, and they wait for slots by urgency like all others.

If no instance is left, the client gets an error at once and may go elsewhere. This journal promises
durable tasks, and no other process can end them. So they wait for an instance, as after a restart
of the orchestrator. They use no budget: it would keep few of a lost lane's tasks.

Tries are limited, because a request may kill its workers. A worker that returns with the same
process was only disconnected, and that try does not count. If two workers have died, the task is
not sent to a third. While it is unknown whether two lost workers died, the task waits until they
return or ``FATE_S`` has passed.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from orchestrator.dispatch.resume import (
    can_resume,
    needs_continue,
    remaining_request,
    with_seed,
)
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.placement.requirements import requirements_of
from orchestrator.tasks.task import Loss, Task
from protocol import Code


class RetryBudget:
    """A token bucket that requests fill and retries empty."""

    def __init__(self, share: float) -> None:
        """``share`` (0 to 1): retries per request in the long run. The burst is its inverse."""
        self._share = share
        self._tokens = self._burst = 1 / share if share else 0.0

    def offered(self) -> None:
        self._tokens = min(self._burst, self._tokens + self._share)

    @property
    def is_empty(self) -> bool:
        return self._tokens < 1.0

    def spend(self) -> None:
        assert not self.is_empty
        self._tokens -= 1.0


RETRYABLE = frozenset({Code.INSTANCE_LOST, Code.DRAINING, Code.NO_CAPACITY, Code.QUEUE_FULL})
"""Codes that concern the instance and not the request."""


FATE_S = 60.0
"""Seconds after which a worker that has not returned counts as dead: most have reloaded their model
by then. A task's deadline may end its wait earlier."""


class RetryDenied(StrEnum):
    """Why a job was not retried."""

    ATTEMPTS = "attempts"
    NOWHERE = "nowhere"
    BUDGET = "budget"
    DEADLINE = "deadline"
    TEXT = "text"
    """The partial text cannot be continued exactly."""
    POISON = "poison"
    """Two workers died with the task."""


ATTEMPTS: Final = 3
"""Maximum number of tries of a task, a clip or a batch's line, including the first (OR-10)."""
DEADLY: Final = ATTEMPTS - 1
"""Number of workers that must have died with a task for it to end: it gets no last try."""
RETRY_SHARE: Final = 0.1
"""Retries of tasks without a token, as a share of submitted requests, in the long run. The burst is
its inverse."""
BACKOFF_S: Final = 0.025
"""Seconds of the first backoff, doubled for each try and drawn from 0.5 to 1.5 times that; also the
interval between checks of a worker's fate."""


class Fate(StrEnum):
    """The state of the workers that were lost with a task."""

    SAFE = "safe"
    """Fewer than ``DEADLY`` workers died."""
    OPEN = "open"
    """``DEADLY`` workers may have died; unknown until they return."""
    POISON = "poison"


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """A retry after ``delay_s`` seconds."""

    delay_s: float
    is_try: bool = True
    """Whether it counts as one of the task's tries."""


class Retrier:
    """Decides on retries. ``granted`` and ``denied`` count them."""

    def __init__(self, registry: Registry, rng: random.Random, floor_ms: float) -> None:
        """``floor_ms``: least remaining time in ms with which a task is admitted."""
        self._registry = registry
        self._rng = rng
        self._floor_ms = floor_ms
        self.budget = RetryBudget(RETRY_SHARE)
        self.granted: Counter[str] = Counter()
        self.denied: Counter[RetryDenied] = Counter()

    def keep_transcript(self, task: Task, address: str) -> None:
        """Record a task's output at an instance if another instance could continue it.

        Sampled texts get a seed for that, unless the instance's sampling does not depend on seed
        and position alone: some servers sample more slowly with one.
        """
        may_go_on = len(self._registry.instances) > 1 or task.entry is not None
        card = self._registry.instances[address].card
        if may_go_on and card is not None and card.can_continue:
            task.sampling = with_seed(task.sampling, self._rng)
        task.is_resumable = may_go_on and task.sampling.max_tokens > 0
        if task.is_resumable:
            task.record(keeps_logprobs=False)

    def decide(
        self,
        task: Task,
        failed: str,
        now: float,
        *,
        elsewhere: bool = False,
        planned: bool = False,
    ) -> RetryAfter | None:
        """Decide on a retry of a task that the instance ``failed`` did not finish; None if denied.

        ``elsewhere``: only to another instance, and at once. A partial text also continues at once,
        unless it is durable. ``planned``: the instance drains, which is not a fault. This does not
        count as a try, and a task without an instance waits for one to return.
        """
        lost = self._registry.instances.get(failed)
        can_go_on = not task.completion_tokens or can_resume(task, lost)
        if task.completion_tokens and can_go_on:
            assert lost is not None and lost.card is not None
            task.begun_by_weights = lost.card.model_digest
            task.needs_continue = needs_continue(task, lost)
        tokens = task.prompt_tokens + task.sampling.max_tokens
        requirements = requirements_of(task, tokens)
        ready = [
            instance
            for instance in self._registry
            if (instance.ready or instance.is_reopening)
            and instance.encoder is not None
            and requirements.allows(instance.candidate(instance.encoder, True, now))
        ]
        if elsewhere:
            ready = [instance for instance in ready if instance.address != failed]
        # A network failure cuts all lanes within a moment, and each would cost a try. So a task
        # that may wait for an instance to return does not move at once to the next.
        at_once = elsewhere or planned or (task.completion_tokens and task.entry is None)
        delay_s = 0.0 if at_once else self._backoff_s(task.attempts)
        if not can_go_on:
            denied: RetryDenied | None = RetryDenied.TEXT
        elif planned:
            denied = self._denied_move(task, ready, now, elsewhere=elsewhere)
        else:
            has_somewhere = bool(ready) or (task.entry is not None and not elsewhere)
            denied = self._denied(task, failed, has_somewhere, now + delay_s)
        if denied is not None:
            # Work that is not lost yet is judged again; poison is counted when it ends a task.
            self.denied[denied] += not elsewhere and denied is not RetryDenied.POISON
            return None
        is_free = task.completion_tokens or task.entry is not None or self._reopens(failed)
        if not (planned or is_free):
            self.budget.spend()
        kind = "continue" if task.completion_tokens else "retry"
        self.granted["move" if planned else kind] += 1
        return RetryAfter(delay_s, is_try=not planned)

    def _denied_move(
        self, task: Task, ready: Sequence[Instance], now: float, *, elsewhere: bool
    ) -> RetryDenied | None:
        if elsewhere and not ready:
            return RetryDenied.NOWHERE
        if task.deadline.left_ms(now) <= self._least_ms(task):
            return RetryDenied.DEADLINE
        return None

    def _denied(
        self, task: Task, failed: str, has_somewhere: bool, starts_at: float
    ) -> RetryDenied | None:
        if self.fate_of(task, starts_at) is Fate.POISON:
            return RetryDenied.POISON
        if not has_somewhere:
            return RetryDenied.NOWHERE
        # Workers that were only disconnected or stalled do not count.
        survived = self._survivals(task, starts_at).count(True)
        if task.attempts + 1 - survived >= ATTEMPTS:
            return RetryDenied.ATTEMPTS
        if task.deadline.left_ms(starts_at) <= self._least_ms(task):
            return RetryDenied.DEADLINE
        if task.completion_tokens or task.entry is not None or self._reopens(failed):
            return None
        return RetryDenied.BUDGET if self.budget.is_empty else None

    def fate_of(self, task: Task, now: float) -> Fate:
        """Whether a task may have killed its workers."""
        survivals = self._survivals(task, now)
        died = survivals.count(False)
        if died + survivals.count(None) < DEADLY:
            return Fate.SAFE
        if died < DEADLY:
            nothing_to_lose = task.entry is not None and not self._registry.any_ready(task.model)
            if nothing_to_lose or now - task.losses[-1].at < FATE_S:
                return Fate.OPEN
        return Fate.POISON

    def can_lose_another(self, task: Task, now: float) -> bool:
        """Whether a task could continue at once even if one more worker is lost with it."""
        survivals = self._survivals(task, now)
        return len(survivals) - survivals.count(True) + 1 < DEADLY

    def _survivals(self, task: Task, now: float) -> list[bool | None]:
        """Whether each lost worker of a task, if its process is known, survived."""
        return [self._survival(loss, now) for loss in task.losses if loss.process_id]

    def _survival(self, loss: Loss, now: float) -> bool | None:
        if loss.is_death:
            return False
        instance = self._registry.instances.get(loss.address)
        if instance is None:  # a replacement has another address
            return False
        if instance.process_id != loss.process_id:
            return False
        if instance.greeted_at > loss.at:
            return True
        # The worker may have been only silent, with the same lanes.
        has_spoken = instance.is_up and now - instance.silent_s(now) > loss.at + BACKOFF_S
        return True if has_spoken else None

    def _reopens(self, failed: str) -> bool:
        """Whether jobs were lost to a model reload, which is not a fault of theirs."""
        lost = self._registry.instances.get(failed)
        return lost is not None and lost.is_reopening

    def _least_ms(self, task: Task) -> float:
        """Least ms that the rest of the task takes, as far as known."""
        _, sampling = remaining_request(task)
        tokens = sampling.max_tokens if sampling.ignore_eos else max(1, sampling.min_tokens)
        return max(self._registry.capacity(task.model).least_ms(tokens), self._floor_ms)

    def _backoff_s(self, attempts: int) -> float:
        pause_s = BACKOFF_S * 2.0 ** min(attempts, ATTEMPTS)  # survivors' tries are not counted
        return pause_s * self._rng.uniform(0.5, 1.5)
