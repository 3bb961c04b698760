"""Checks that refuse a task before it costs anything (LB-1: under 10 ms; they take microseconds).

``begin`` runs the checks that need no prompt. ``fit`` checks the prompt against the context.
``finish`` checks that an instance can take the task and that its deadline can be kept (DL-7).
"""

from dataclasses import dataclass

import msgspec

from orchestrator.clock import Clock
from orchestrator.errors import ContextOverflow, Draining, InvalidRequest, NoCapacity, NotReady
from orchestrator.instances.registry import Registry
from orchestrator.placement.placer import Placer
from orchestrator.placement.requirements import FIELDS, features_of
from orchestrator.prediction.prediction import Prediction
from orchestrator.tasks.job import Job, PlacementMode
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork
from protocol import Feature, InvalidSampling, ModelCard, OnDeadline


def usual_tokens(job: Job, card: ModelCard, default_max_tokens: int) -> int:
    """The most tokens of a job that states no ``max_tokens``, if they fit into the context."""
    most = job.default_max_tokens or default_max_tokens
    limit = card.sampling_defaults.max_tokens
    return most if limit is None else min(most, limit)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Settings of admission."""

    floor_ms: float
    """Shortest time until the deadline, in ms, with which a task is admitted."""
    default_max_tokens: int


class Admission:
    """Admits tasks, or raises the error that says why not."""

    def __init__(
        self,
        registry: Registry,
        placer: Placer,
        prediction: Prediction,
        clock: Clock,
        config: AdmissionConfig,
    ) -> None:
        self.draining = False
        self._registry = registry
        self._placer = placer
        self._prediction = prediction
        self._clock = clock
        self.config = config

    def begin(self, work: AnyWork) -> None:
        """Check the service and the deadline. Raises ``Draining``, ``DeadlineExceeded``."""
        self.require_open()
        self._require_time(work)

    def require_open(self) -> None:
        """Check that the service takes work. Raises ``Draining``."""
        if self.draining:
            raise Draining("the service is shutting down and takes no new work")

    def fit(self, task: Task, card: ModelCard) -> None:
        """Fill in the model's defaults, and fit ``max_tokens`` to the context. Raises
        ``ContextOverflow`` or ``InvalidRequest``."""
        context, prompt = card.context_tokens, len(task.token_ids)
        left = context - prompt
        if left < 1:
            raise ContextOverflow.of_prompt(prompt, context, card.context_note)
        wanted, defaults = task.job.max_tokens, card.sampling_defaults
        sampling = defaults.fill(task.sampling, task.job.unstated)
        if wanted is None:
            most = usual_tokens(task.job, card, self.config.default_max_tokens)
            wanted = min(left, max(most, sampling.min_tokens))
        elif task.job.cuts_max_tokens:
            wanted = min(left, wanted)
        elif wanted > left:
            raise ContextOverflow.of_answer(prompt, wanted, context, card.context_note)
        # A ``top_k`` above the vocabulary size selects all of it, and may exceed 64 bits.
        top_k = sampling.top_k if sampling.top_k < card.vocab_size else 0
        sampling = msgspec.structs.replace(sampling, max_tokens=wanted, top_k=top_k)
        try:
            sampling.check(card.vocab_size)
        except InvalidSampling as error:
            raise InvalidRequest(str(error), field=error.field) from None
        task.sampling = sampling
        task.features = features_of(task.job, task.sampling, has_images=bool(task.images))

    def finish(self, task: Task) -> None:
        """Check that the task can be placed, and that its deadline can be kept. Raises
        ``InvalidRequest``, ``NotReady``, ``NoCapacity``, ``DeadlineExceeded`` or
        ``DeadlineInfeasible``."""
        self._require_place(task)
        self._require_time(task)
        self._prediction.promises.claim(task)
        if task.job.on_deadline is OnDeadline.FIT:
            self._predict_fit(task)
        if not self._prediction.feasibility.admits(task):
            raise self._prediction.feasibility.infeasible(task)

    def _require_time(self, work: AnyWork) -> None:
        now = self._clock.now()
        work.deadline.require(self.config.floor_ms, now)
        work.parts.require(self.config.floor_ms, now)

    def _require_place(self, task: Task) -> None:
        """Raise unless an instance may and can take ``task``, now or later."""
        placement, known = task.job.placement, self._registry.instances
        # A task that is pinned to unknown instances would never start.
        if placement.mode is PlacementMode.PIN and not any(
            name in known for name in placement.instances
        ):
            raise InvalidRequest(
                f"there is no instance {placement.instances[0][:128]!r}; available: "
                + (", ".join(sorted(known)) or "none"),
                field="placement.instances",
            )
        is_possible = self._placer.is_possible(task)
        if not self._registry.any_ready(task.model):
            # During a swap that keeps the model's name, or after a machine stalled for a second,
            # the task waits as it would for a slot.
            if self._registry.any_returning_to(task.model) and self._placer.may_return(task):
                return
            raise NotReady(f"no instance that serves {task.model!r} is ready; try again shortly")
        dark_s = self._registry.dark_s(task.model)
        if dark_s > 0:
            raise NotReady(
                f"all instances that serve {task.model!r} fail on every request; they are"
                f" tried again in {dark_s:.1f} s",
                retry_after_ms=1000 * dark_s,
            )
        lacking = self._placer.lacking(task)
        if lacking:
            raise _unable(task, lacking)
        # If the task needs features, instances that have them may come back; other clients can ask
        # for less.
        if not is_possible and not (task.features and self._placer.may_return(task)):
            raise NotReady(
                "no ready instance can take this task, given its placement and its length; "
                "try again shortly, or ask for less"
            )
        if self._placer.is_excluded(task):
            raise NoCapacity(
                "the operator's placement policy lets no instance take this task", retryable=False
            )

    def _predict_fit(self, task: Task) -> None:
        """Forecast the answer's length for the client; it is final when the task starts (DL-6)."""
        forecaster, now = self._prediction.forecaster, self._clock.now()
        forecaster.plan(task, now)
        wait_ms = 0.0
        if not self._placer.could_start(task):
            wait_ms = self._prediction.schedule.start_ms(task)
        tokens = forecaster.fitting_tokens(task, task.deadline.left_ms(now) - wait_ms)
        if tokens is not None and tokens < task.sampling.max_tokens:
            task.fitted_tokens = tokens


def _unable(task: Task, lacking: frozenset[Feature]) -> InvalidRequest:
    """Error for a task that needs features that no instance of the model has."""
    names = sorted(lacking)
    stated = task.job.placement.capabilities
    field = next((FIELDS[name] for name in names if name in FIELDS and name not in stated), None)
    return InvalidRequest(
        f"no instance of {task.model!r} supports what this request needs: {' and '.join(names)} "
        "(see lacks in /v2/instances); leave it out, or ask for another model",
        field="placement.capabilities" if stated & lacking else field,
    )
