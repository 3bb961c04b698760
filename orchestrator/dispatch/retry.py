"""Decides which jobs get a second try, and when (OR-10).

Before the first token a job that its instance lost or would not take goes back to the queue. After
it, a text can go on elsewhere from where it stopped (``resume``).

Both cost work a second time, and are not attempted when the deadline could not be kept any more
(DL-12). Jobs that have not begun draw on a budget, a share of what is offered, so that a fault that
follows the requests cannot keep the service busy. Texts that have begun do not: there are no more
of them than an instance has slots, their clients have read half of them, and they wait for slots by
urgency like all others.

If no instance is left, the client is told at once and may go elsewhere. A durable task was promised
by this journal, and nobody else can end it: it waits for an instance, as it does after a restart of
the orchestrator, and draws on no budget, or few of all the tasks that a lane held would be kept.

Tries are numbered, since a request may be what its workers die of. A worker that is back with the
process it had was only cut off, and that try does not count. Once two have died, the task is not
sent to a third. While it is not known whether two that went away died, the task waits until they
are back or ``FATE_S`` is over.
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


RETRYABLE = frozenset({Code.INSTANCE_LOST, Code.DRAINING, Code.NO_CAPACITY, Code.QUEUE_FULL})
"""Codes that say something about the instance, and nothing about the request."""


FATE_S = 10.0
"""Seconds after which a worker that is not back counts as dead."""
FATE_DURABLE_S = 60.0
"""``FATE_S`` for a durable task: most workers have loaded their model again by then."""


class RetryDenied(StrEnum):
    """Why a job got no second try."""

    ATTEMPTS = "attempts"
    NOWHERE = "nowhere"
    BUDGET = "budget"
    DEADLINE = "deadline"
    TEXT = "text"
    """The text has begun, and cannot be continued exactly."""
    POISON = "poison"
    """Two workers died with the task."""


ATTEMPTS: Final = 3
"""Most times that a task, a clip or a batch's line is sent, the first one included (OR-10)."""
DEADLY: Final = ATTEMPTS - 1
"""How many workers must have died with a task for it to end: the last try is for none of these."""
RETRY_SHARE: Final = 0.1
"""Second tries of tasks that had not begun, over requests offered, in the long run. At once there
may be as many as requests earn one."""
BACKOFF_S: Final = 0.025
"""Seconds of the first pause, doubled for each try, drawn from 0.5 to 1.5 times that; and between
two looks at what became of a worker."""


class Fate(StrEnum):
    """The state of the workers that a task was lost with."""

    SAFE = "safe"
    """Fewer than ``DEADLY`` workers died."""
    OPEN = "open"
    """``DEADLY`` workers may have died: it shows when they are back."""
    POISON = "poison"


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """A second try, after a pause of ``delay_s`` seconds."""

    delay_s: float
    is_try: bool = True
    """Whether it counts among a task's tries."""


class Retrier:
    """Decides on second tries. ``granted`` and ``denied`` count them."""

    def __init__(self, registry: Registry, rng: random.Random, floor_ms: float) -> None:
        """``floor_ms`` is the least time with which a task is let in."""
        self._registry = registry
        self._rng = rng
        self._floor_ms = floor_ms
        self.budget = RetryBudget(RETRY_SHARE, 1 / RETRY_SHARE if RETRY_SHARE else 0.0)
        self.granted: Counter[str] = Counter()
        self.denied: Counter[RetryDenied] = Counter()

    def keep_transcript(self, task: Task, address: str) -> None:
        """Keep what a task generates at an instance, if another one could go on with it.

        Sampled texts get a seed for that, unless the instance's draws do not follow from seed and
        position anyway: some servers draw more slowly with one.
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
        """Whether a task that the instance ``failed`` did not finish is sent once more; None if
        not.

        ``elsewhere``: only to another instance, and at once. A begun text continues at once as
        well, unless it is durable. ``planned``: the instance drains, which is nobody's fault.
        This counts as no try, and a task that has nowhere to go waits for an instance to come back.
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
        # A network that is cut takes all lanes within a moment, and each would cost a try: a task
        # that may wait for an instance to come back does not run from one to the next.
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
            # Work that is not lost yet is asked about again; poison counts where it ends a task.
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
        # Workers that were only cut off, or stood still, do not count.
        survived = self._survivals(task, starts_at).count(True)
        if task.attempts + 1 - survived >= ATTEMPTS:
            return RetryDenied.ATTEMPTS
        if task.deadline.left_ms(starts_at) <= self._least_ms(task):
            return RetryDenied.DEADLINE
        if task.completion_tokens or task.entry is not None or self._reopens(failed):
            return None
        return RetryDenied.BUDGET if self.budget.is_empty else None

    def fate_of(self, task: Task, now: float) -> Fate:
        """Whether a task may be what its workers die of."""
        survivals = self._survivals(task, now)
        died = survivals.count(False)
        if died + survivals.count(None) < DEADLY:
            return Fate.SAFE
        if died < DEADLY:
            patience_s = FATE_S if task.entry is None else FATE_DURABLE_S
            nothing_to_lose = task.entry is not None and not self._registry.any_ready(task.model)
            if nothing_to_lose or now - task.losses[-1].at < patience_s:
                return Fate.OPEN
        return Fate.POISON

    def can_lose_another(self, task: Task, now: float) -> bool:
        """Whether a task need not wait for its fate even if one more worker is lost with it."""
        survivals = self._survivals(task, now)
        return len(survivals) - survivals.count(True) + 1 < DEADLY

    def _survivals(self, task: Task, now: float) -> list[bool | None]:
        """Whether each worker that a task was lost with, and whose process is known, lived on."""
        return [self._survival(loss, now) for loss in task.losses if loss.process_id]

    def _survival(self, loss: Loss, now: float) -> bool | None:
        if loss.is_death:
            return False
        instance = self._registry.instances.get(loss.address)
        if instance is None:  # another in its place has another address
            return False
        if instance.process_id != loss.process_id:
            return False
        if instance.greeted_at > loss.at:
            return True
        # Perhaps the worker was only silent: its lanes are the same.
        has_spoken = instance.is_up and now - instance.silent_s(now) > loss.at + BACKOFF_S
        return True if has_spoken else None

    def _reopens(self, failed: str) -> bool:
        """Whether jobs were lost to a model's reload: no fault that follows them."""
        lost = self._registry.instances.get(failed)
        return lost is not None and lost.is_reopening

    def _least_ms(self, task: Task) -> float:
        """Least ms that the rest of the task takes, as far as that is known."""
        _, sampling = remaining_request(task)
        tokens = sampling.max_tokens if sampling.ignore_eos else max(1, sampling.min_tokens)
        return max(self._registry.capacity(task.model).least_ms(tokens), self._floor_ms)

    def _backoff_s(self, attempts: int) -> float:
        pause_s = BACKOFF_S * 2.0 ** min(attempts, ATTEMPTS)  # those that survived are not counted
        return pause_s * self._rng.uniform(0.5, 1.5)
