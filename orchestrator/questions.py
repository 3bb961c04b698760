"""Answers questions about tokens, quotes, limits and waiting requests; submits nothing."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from orchestrator.admission.rate_limits import Standing
from orchestrator.clock import Clock
from orchestrator.extension import Extension
from orchestrator.fair_share import FairGate
from orchestrator.ids import Ids
from orchestrator.prediction.quotes import Quote
from orchestrator.stages import Stages
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Job, Prompt
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import aborted
from protocol import AbortCause


class QuotedTask(NamedTuple):
    """A task that was read but never queued, and has ended; and its quote."""

    task: Task
    quote: Quote


class QueueRoom(NamedTuple):
    """Maximum number of waiting requests (``bound``), and how many more fit now (``left``)."""

    bound: int
    left: int


class Questions:
    """Answers questions about one orchestrator."""

    def __init__(
        self,
        stages: Stages,
        clock: Clock,
        ids: Ids,
        rooms: Sequence[Extension],
        salt_of: Callable[[Job], str],
    ) -> None:
        """``salt_of`` returns the salt of a job's cached prefixes."""
        self._stages = stages
        self._clock = clock
        self._ids = ids
        self._rooms = rooms
        self._salt_of = salt_of
        self._turns = FairGate()
        """Quotes take milliseconds of the event loop: other work runs between two (OR-24)."""

    def require_known(self, name: str) -> None:
        """Raise ``ModelNotFound`` or ``NotReady`` unless the model is served or loadable."""
        if name not in self._stages.demand.loadable():
            self._stages.models.resolve(name)

    async def quote(self, job: Job, prompt: Prompt | None, prompt_tokens: int) -> QuotedTask:
        """The chance that a request is in time, by deadline, if it is sent now; without a
        ``prompt``, of one with ``prompt_tokens`` uncached tokens. Raises ``TidegateError``."""
        stages = self._stages
        stages.admission.require_open()
        with stages.limits.counted(job.key):
            encoder = stages.models.resolve(job.model)
            task = Task(self._ids.new(), job)
            task.model, task.adapter = encoder.card.model, encoder.adapter
            task.cache_salt = self._salt_of(job)
            try:
                if prompt is not None:
                    await stages.reader.read(task, encoder, prompt)
                else:
                    task.token_ids = range(prompt_tokens)  # only their number counts
                    task.prompt_tokens = prompt_tokens
                stages.admission.fit(task, encoder.card)
                await self._turns.enter(job.tenant)
                try:
                    await asyncio.sleep(0)
                    return QuotedTask(task, stages.prediction.quotes.quote(task))
                finally:
                    self._turns.leave(job.tenant, 1.0)  # all take about as long
            finally:  # releases the prompt's resources
                task.end(aborted(AbortCause.CANCEL), self._clock.now())

    async def count_tokens(
        self, model: str, prompt: Prompt, deadline: Deadline, key: str, tenant: str
    ) -> int:
        """The number of tokens of a prompt as a request gets it. Raises ``TidegateError``."""
        with self._stages.limits.counted(key):
            encoder = self._stages.models.resolve(model)
            return len(await self._stages.reader.token_ids(encoder, prompt, deadline, tenant))

    def standings(self, key: str) -> list[Standing]:
        """The remaining units of a key's limits."""
        of_rooms = chain.from_iterable(room.standings(key) for room in self._rooms)
        return [*self._stages.limits.standings(key), *of_rooms]

    @property
    def queue_room(self) -> QueueRoom | None:
        """Room in the queue; None if it is unbounded, or if no request may wait."""
        bound, new = self._stages.queue.bound, self._stages.queue.new
        return QueueRoom(bound, max(0, bound - new)) if bound > 0 else None

    def queue_position(self, task: Task) -> int:
        """Number of tasks that start before this one; 0 after it has started."""
        return self._stages.queue.place_of(task) if task in self._stages.queue else 0

    def predicted_start_ms(self, task: Task) -> float:
        """Predicted ms until a queued task starts; 0 after it has left the queue."""
        is_waiting = task in self._stages.queue
        return self._stages.prediction.schedule.start_ms(task) if is_waiting else 0.0
