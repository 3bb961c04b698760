"""What is refused before it costs anything (LB-1: under 10 ms, in fact a few microseconds).

``begin`` looks at what needs no prompt, ``fit`` at the prompt against the context, ``finish`` at
whether the deadline can be kept (DL-7) and whether there is room (OR-4).
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from orchestrator.admission.outlook import Outlook
from orchestrator.clock import Clock
from orchestrator.errors import (
    ContextOverflow,
    DeadlineInfeasible,
    Draining,
    InvalidRequest,
    NoCapacity,
    NotReady,
    QueueFull,
)
from orchestrator.instances.registry import Registry
from orchestrator.placement import Placer
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.refusals import Kind, Refusals
from orchestrator.queue.order import AdmissionMode, QueuePolicy
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.task import PlacementMode, Task
from orchestrator.telemetry.log import fields, service_log
from worker.protocol import InvalidSampling, ModelCard, OnDeadline

RESUBMIT_MS = 20.0
"""A client needs about this long to ask again."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """What an operator wants."""

    floor_ms: float
    default_max_tokens: int
    mode: AdmissionMode = AdmissionMode.ENFORCE
    queue_policy: QueuePolicy = QueuePolicy.REJECT
    refusal_cap: float = 1.0
    """At most this share of what is offered is refused as infeasible, over the last 100 or so."""
    sample: float = 0.01
    """This share of would-be refusals is let through, to measure how many would have been wrong."""


class Admission:
    """Lets tasks in, or raises the error that tells their client why not."""

    def __init__(
        self,
        registry: Registry,
        queue: TaskQueue[Task],
        forecaster: Forecaster,
        placer: Placer,
        clock: Clock,
        rng: random.Random,
        rules: AdmissionConfig,
        *,
        drop: Callable[[Task, QueueFull], None],
        sweep: Callable[[], None],
    ) -> None:
        """``drop`` ends a waiting task, ``sweep`` those that have waited in vain."""
        self.draining = False
        self.refusals = Refusals(lambda task: rng.random() < rules.sample)
        self._registry = registry
        self._queue = queue
        self._forecaster = forecaster
        self._placer = placer
        self._clock = clock
        self._rng = rng
        self._rules = rules
        self.outlook = Outlook(registry, queue, forecaster, clock)
        self._drop = drop
        self._sweep = sweep

    def begin(self, task: Task) -> None:
        """Raises ``Draining`` or ``DeadlineExceeded``."""
        if self.draining:
            raise Draining("the service is going down and takes no new work")
        now = self._clock.now()
        task.deadline.require(self._rules.floor_ms, now)
        task.parts.require(self._rules.floor_ms, now)

    def fit(self, task: Task, card: ModelCard) -> None:
        """Settle what to generate. Raises ``ContextOverflow`` or ``InvalidRequest``."""
        context, prompt = card.context_tokens, len(task.token_ids)
        left = context - prompt
        if left < 1:
            raise ContextOverflow.of_prompt(prompt, context, card.context_note)
        asked = task.job.max_tokens
        if asked is not None and asked > left:
            raise ContextOverflow(
                f"max_tokens is {asked}, but the model's context of {context} tokens leaves "
                f"{left} after a prompt of {prompt}: ask for at most {left}{card.context_note}",
                field="max_tokens",
            )
        defaults = card.sampling_defaults
        sampling = defaults.fill(task.sampling, task.job.unstated)
        wanted = asked
        if wanted is None:
            most = self._rules.default_max_tokens
            if defaults.max_tokens is not None:
                most = min(most, defaults.max_tokens)
            wanted = min(left, max(most, sampling.min_tokens))
        # Wider than the vocabulary is the same as all of it, and need not fit in 64 bits.
        top_k = sampling.top_k if sampling.top_k < card.vocab_size else 0
        sampling = msgspec.structs.replace(sampling, max_tokens=wanted, top_k=top_k)
        try:
            sampling.check(card.vocab_size)
        except InvalidSampling as error:
            raise InvalidRequest(str(error), field=error.field) from None
        task.sampling = sampling

    def finish(self, task: Task) -> None:
        """Raises ``InvalidRequest``, ``NotReady``, ``NoCapacity``, ``DeadlineExceeded``,
        ``DeadlineInfeasible`` or ``QueueFull``.
        """
        self._require_known(task)
        if not self._registry.any_ready(task.model):
            raise NotReady(f"no instance that serves {task.model!r} is ready; try again shortly")
        if not self._placer.is_possible(task):
            raise NotReady(
                "no instance that is ready can take this task, by its placement and its length; "
                "try again shortly, or ask for less"
            )
        if self._placer.is_excluded(task):
            raise NoCapacity(
                "the operator's placement policy lets no instance take this", retryable=False
            )
        now = self._clock.now()
        task.deadline.require(self._rules.floor_ms, now)
        task.parts.require(self._rules.floor_ms, now)
        self.outlook.claim(task)
        if task.job.on_deadline is OnDeadline.FIT:
            self._forecaster.plan(task, now)
            # What it will be is settled when it starts; this is what its client is told now.
            wait_ms = 0.0 if self.could_start(task) else self.outlook.start_ms(task)
            tokens = self._forecaster.fitting_tokens(task, task.deadline.left_ms(now) - wait_ms)
            if tokens is not None and tokens < task.sampling.max_tokens:
                task.fitted_tokens = tokens
        self._judge(task, now)
        if self._queue.full and not self.could_start(task):
            self._make_room(task)

    def _require_known(self, task: Task) -> None:
        """Raise ``InvalidRequest`` for a pin to nothing that there is: it would wait in vain."""
        wish, known = task.job.placement, self._registry.instances
        if wish.mode is PlacementMode.PIN and not any(name in known for name in wish.instances):
            raise InvalidRequest(
                f"there is no instance {wish.instances[0][:128]!r}; there is: "
                + (", ".join(sorted(known)) or "none"),
                field="placement.instances",
            )

    def could_start(self, task: Task) -> bool:
        """Whether an instance has room for this task now."""
        return self._placer.could_start(task)

    def _judge(self, task: Task, now: float) -> None:
        """Forecast, and refuse what is certain to miss (DL-7)."""
        self._forecaster.plan(task, now)
        forecast = self._forecaster.forecast(task)
        rules, refusals = self._rules, self.refusals
        if rules.mode is AdmissionMode.OFF:
            return
        left_ms = task.deadline.left_ms(now)
        if forecast.least_ms < left_ms:
            refusals.offered(refused=False)
            return
        refusals.infeasible += 1
        lets_in = rules.mode is AdmissionMode.OBSERVE or self._is_capped
        if not lets_in and not refusals.keeps(task, Kind.ADMISSION):
            refusals.offered(refused=True)
            raise self.infeasible(task)
        refusals.offered(refused=False)
        refusals.keep(task, Kind.ADMISSION)
        self._forecaster.plan(task, now)
        service_log.info(
            "a deadline that is certain to be missed was let through",
            extra=fields(
                correlation_id=task.correlation_id,
                left_ms=round(left_ms, 1),
                least_ms=round(forecast.least_ms, 1),
            ),
        )

    @property
    def _is_capped(self) -> bool:
        cap = self._rules.refusal_cap
        return cap < 1 and self.refusals.recent_share >= cap

    def refuses_late(self, task: Task) -> bool:
        """Whether a waiting task that is certain to miss goes; a sample of them gets its try."""
        # A faster instance may have come up since it was planned.
        task.drop_at = self._forecaster.drop_at(task)
        if task.drop_at > self._clock.now():
            return False
        self.refusals.infeasible += 1
        if not self._is_capped and not self.refusals.keeps(task, Kind.QUEUE):
            self.refusals.refused_late()
            return True
        self.refusals.keep(task, Kind.QUEUE)
        self._forecaster.plan(task, self._clock.now())
        return False

    def infeasible(self, task: Task) -> DeadlineInfeasible:
        """Why a task cannot make its deadline from here."""
        now = self._clock.now()
        waited_ms = 1000 * (now - task.marks.received)
        wait_ms = 0.0
        if self._queue or not self.could_start(task):
            wait_ms = max(self.outlook.promised_wait_ms(), self.outlook.start_ms(task))
        forecast = self._forecaster.forecast(task, wait_ms=wait_ms)
        left_ms = task.deadline.left_ms(now)
        # With what it has waited it would have had enough: then waiting is what it lacked.
        in_vain = forecast.least_ms < left_ms + waited_ms and task.marks.queued > 0
        binding = "queue" if in_vain else forecast.bottleneck
        # Work that is quick may still need more: no worker starts with less left than its floor.
        finish_ms = max(forecast.finish_ms, forecast.least_ms)
        slow_ms = max(forecast.wait_ms + forecast.slow_ms, forecast.least_ms)
        # A moment more than the service needs, for a request that has to come first.
        earliest_unix_ms = math.ceil(1000 * self._clock.unix() + slow_ms + RESUBMIT_MS)
        self.outlook.promise(earliest_unix_ms, task)
        return DeadlineInfeasible(
            f"{left_ms:.0f} ms remain until the deadline; this is likely to need "
            f"{finish_ms:.0f} ms and cannot do with less than {forecast.least_ms:.0f} ms: "
            "state a later deadline, or ask for less",
            predicted_finish_ms=finish_ms,
            earliest_feasible_unix_ms=earliest_unix_ms,
            binding_constraint=binding,
        )

    def _make_room(self, task: Task) -> None:
        expiry = self._queue.next_expiry
        if expiry is not None and expiry <= self._clock.now():
            self._sweep()
        if not self._queue.full:
            return
        retry_after_ms = self.outlook.room_ms(task.model)
        if self._rules.queue_policy is QueuePolicy.DROP_LRU:
            oldest = self._queue.oldest_batch(
                lambda other: not (other.refusal_sample or other.paused_on)
            )
            if oldest is not None:
                if self.refusals.keeps(oldest, Kind.DROPPED):
                    self.refusals.keep(oldest, Kind.DROPPED)
                    self._forecaster.plan(oldest, self._clock.now())
                    self._queue.reorder([oldest])
                    return
                message = "newer work took this task's place in the queue, which is full"
                self._drop(oldest, QueueFull(message, retry_after_ms=retry_after_ms))
                return
        if self.refusals.keeps(task, Kind.QUEUE_FULL):
            self.refusals.keep(task, Kind.QUEUE_FULL)
            self._forecaster.plan(task, self._clock.now())
            return
        raise QueueFull(
            f"{len(self._queue)} tasks wait already, the queue's bound",
            retry_after_ms=retry_after_ms,
        )
