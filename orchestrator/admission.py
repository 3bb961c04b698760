"""What is refused before it costs anything (LB-1: under 10 ms, in fact a few microseconds).

``begin`` looks at what needs no prompt, ``fit`` at the prompt against the context, ``finish`` at
whether there is room. Later issues put feasibility (DL-7) and rate limits (OR-12) behind these.
"""

import msgspec

from orchestrator.clock import Clock
from orchestrator.errors import ContextOverflow, Draining, InvalidRequest, NotReady, QueueFull
from orchestrator.placement import Need, place
from orchestrator.queue import TaskQueue
from orchestrator.registry import Registry
from orchestrator.task import Task
from worker.protocol import InvalidSampling, ModelCard

_SMOOTHING = 0.1


class ServiceTime:
    """Moving average of how long a task occupies a slot, in seconds."""

    def __init__(self, first_guess_s: float = 1.0) -> None:
        self.mean_s = first_guess_s

    def observe(self, seconds: float) -> None:
        self.mean_s += _SMOOTHING * (seconds - self.mean_s)

    def wait_ms(self, ahead: int, slots: int) -> float:
        """How long until ``slots`` busy slots have taken ``ahead`` tasks and one more."""
        return 1000 * self.mean_s * (ahead + 1) / max(1, slots)


class Admission:
    """Lets tasks in, or raises the error that tells their client why not."""

    def __init__(
        self,
        registry: Registry,
        queue: TaskQueue[Task],
        service_time: ServiceTime,
        clock: Clock,
        *,
        floor_ms: float,
        default_max_tokens: int,
    ) -> None:
        self.draining = False
        self._registry = registry
        self._queue = queue
        self._service_time = service_time
        self._clock = clock
        self._floor_ms = floor_ms
        self._default_max_tokens = default_max_tokens

    def begin(self, task: Task) -> None:
        """Raises ``Draining`` or ``DeadlineExceeded``."""
        if self.draining:
            raise Draining("the service is going down and takes no new work")
        task.deadline.require(self._floor_ms, self._clock.now())

    def fit(self, task: Task, card: ModelCard) -> None:
        """Settle what to generate. Raises ``ContextOverflow`` or ``InvalidRequest``."""
        context, prompt = card.context_tokens, len(task.token_ids)
        left = context - prompt
        if left < 1:
            raise ContextOverflow.of_prompt(prompt, context)
        asked = task.job.max_tokens
        if asked is not None and asked > left:
            raise ContextOverflow(
                f"max_tokens is {asked}, but the model's context of {context} tokens leaves "
                f"{left} after a prompt of {prompt}: ask for at most {left}",
                field="max_tokens",
            )
        sampling = task.sampling
        wanted = asked
        if wanted is None:
            wanted = min(left, max(self._default_max_tokens, sampling.min_tokens))
        # Wider than the vocabulary is the same as all of it, and need not fit in 64 bits.
        top_k = sampling.top_k if sampling.top_k < card.vocab_size else 0
        sampling = msgspec.structs.replace(sampling, max_tokens=wanted, top_k=top_k)
        try:
            sampling.check(card.vocab_size)
        except InvalidSampling as error:
            raise InvalidRequest(str(error), field=error.field) from None
        task.sampling = sampling

    def finish(self, task: Task) -> None:
        """Raises ``NotReady``, ``QueueFull`` or ``DeadlineExceeded``."""
        if not self._registry.any_ready(task.model):
            raise NotReady(f"no instance that serves {task.model!r} is ready; try again shortly")
        task.deadline.require(self._floor_ms, self._clock.now())
        if self._queue.full and not self.could_start(task):
            raise QueueFull(
                f"{len(self._queue)} tasks wait already, the queue's bound",
                retry_after_ms=self.predicted_wait_ms(len(self._queue)),
            )

    def could_start(self, task: Task) -> bool:
        """Whether an instance has room for this task now."""
        return place(Need(task.model, task.vocabulary), self._registry.candidates()) is not None

    def predicted_wait_ms(self, ahead: int) -> float:
        """How long until a task with that many before it starts, by recent service times."""
        slots = sum(candidate.slots for candidate in self._registry.candidates() if candidate.ready)
        return self._service_time.wait_ms(ahead, slots)
