"""Moves a request through its stages, from its arrival to its end."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from orchestrator.admission.reader import Reading
from orchestrator.clock import Clock
from orchestrator.errors import Draining, InvalidRequest, QueueFull, TidegateError
from orchestrator.extension import Extension, Submit
from orchestrator.ids import Ids
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.prompts.kinds import tokens_about
from orchestrator.prompts.time_left import with_time_left
from orchestrator.questions import Questions
from orchestrator.settings import Settings
from orchestrator.stages import Stages
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import ROOM_FIELDS, Job, OnDisconnect, Prompt
from orchestrator.tasks.run_lengths import RunWatch
from orchestrator.tasks.runs import Runs
from orchestrator.tasks.task import Listener, Task
from orchestrator.tasks.verdicts import aborted, failed, lost, refused
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import Metrics
from protocol import AbortCause

if TYPE_CHECKING:
    from orchestrator.tasks.spans import Tracing


class Orchestrator:
    """Moves requests through the stages. One per process."""

    def __init__(
        self,
        stages: Stages,
        settings: Settings,
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
        rooms: Sequence[Extension],
        tracing: "Tracing | None",
    ) -> None:
        """``rng`` makes ids; an id is enough to read its text. ``rooms``: the optional rooms.
        Without ``tracing`` no traces are sent."""
        self.stages = stages
        self.metrics = metrics
        self.clock = clock
        self.tracing = tracing
        self.limits = stages.limits
        self.registry = stages.registry
        self.models = stages.models
        self.queue = stages.queue
        self.store = stages.store
        self.started_unix = int(clock.unix())
        self.deadlines = settings.deadlines
        self.rooms = rooms
        self.task_over = asyncio.Event()
        """Set whenever work ends; the waiter clears it."""
        self.on_offered: list[Callable[[Task], None]] = []
        """Called with each admitted task after it is queued or sent."""
        self.on_ended: list[Callable[[Task], None]] = []
        """Called with each ended task, including refused ones."""
        self.runs = Runs(clock)
        self.run_watch = RunWatch(clock) if settings.dispatch.learn_runs else None
        self.isolate_tenants = False
        """Whether cached prefixes are separate per tenant."""
        self.sharing = stages.sharing
        self.ids = Ids(rng, stages.sharing.tag)
        self._rng = rng
        self._live: dict[Task, None] = {}
        """All tasks that have not ended, oldest first; an ordered set."""
        self.questions = Questions(stages, clock, self.ids, rooms, self._salt_of)
        for room in rooms:
            room.bind(self)

    async def submit(self, job: Job, prompt: Prompt, listeners: Sequence[Listener] = ()) -> Task:
        """Submit a request. Returns after it is queued or sent; raises the error if it is refused.
        In any case the request is counted as submitted and has exactly one outcome. ``listeners``
        get all events except a refusal, which is raised."""
        task = await self.prepare(job, prompt)
        self.offer(task, listeners)
        if task.entry is not None:
            await self._committed(task)
        return task

    def room_of(self, job: Job) -> Submit | None:
        """The function that submits a room's job; None for a job of the service itself."""
        found = (room.submit_of(job) for room in self.rooms)
        return next((submit for submit in found if submit is not None), None)

    async def prepare(self, job: Job, prompt: Prompt, reading: Reading | None = None) -> Task:
        """The first half of ``submit``: the steps that need the prompt. The caller must then
        ``offer`` or ``cancel`` the task. ``reading`` comes from another task with the same prompt.
        """
        task = self._take(job)
        with self._admitting(task):
            if job.durable:
                self._require_journal()
            prompt = with_time_left(prompt, task.job, task.deadline.at - self.clock.now())
            with _leaving_when_ended(task):
                await self._read(task, prompt, reading)
        return task

    def _take(self, job: Job) -> Task:
        """Create a task and count it as submitted; ``_admitting`` or ``end`` must end it."""
        task = Task(self.ids.new(), self.runs.join(job))
        self._enter(task)
        self._count(task)
        return task

    def _enter(self, task: Task) -> None:
        """Register a task as live until its end."""
        task.cache_salt = self._salt_of(task.job)
        self._live[task] = None
        task.on_end.append(self._ended)

    def _salt_of(self, job: Job) -> str:
        return job.tenant if self.isolate_tenants else ""

    def _count(self, task: Task) -> None:
        """Count a task as submitted, and follow it so that its end is counted too."""
        self.runs.follow(task)
        self.stages.settler.metrics.offered.labels(task.job.api).inc()
        if self.tracing is not None and task.ending is None:
            task.spans = self.tracing.of_task(task)

    def offer(self, task: Task, listeners: Sequence[Listener] = ()) -> None:
        """The second half of ``submit``: queue or send the task. Raises an error if refused."""
        if task.ending is not None:  # cancelled, or the service is shutting down
            assert task.ending.error is not None
            raise task.ending.error
        with self._admitting(task):
            self.stages.admission.finish(task)
            self.stages.dispatcher.require_room(task)
        if task.job.keep:
            self.store.add(task)
        if task.job.durable:
            self._write_down(task)
        for listener in listeners:
            task.listen(listener)
        self.stages.prediction.quotes.offered(task)
        self.stages.dispatcher.enqueue(task)
        self.stages.demand.queued(task)
        for call in self.on_offered:
            call(task)

    def readmit(self, task: Task, *, is_new: bool = True) -> None:
        """Take over a task that an earlier process admitted and promised. No check refuses it. If
        it ``is_new`` to this process it is counted as recovered: the earlier process counted it as
        submitted. The caller must ``requeue`` it when its model is available."""
        task.job = self.runs.join(task.job)
        self.runs.follow(task)
        if is_new:
            self.stages.settler.metrics.recovered.labels(task.job.api).inc()
        self._live[task] = None
        task.on_end.append(self._ended)
        if self.tracing is not None:
            task.spans = self.tracing.of_task(task)
        self.store.add(task)

    def requeue(self, task: Task) -> None:
        self.stages.dispatcher.enqueue(task)
        for call in self.on_offered:
            call(task)

    def _require_journal(self) -> None:
        durable = self.stages.durable
        if durable is None:
            raise InvalidRequest(
                "durable needs a journal, and this service has none: its operator must set "
                "TIDEGATE_JOURNAL__PATH",
                field="durable",
            )
        durable.require()

    def _write_down(self, task: Task) -> None:
        """Write a task to the journal, with all data that another process needs to continue it."""
        durable = self.stages.durable
        assert durable is not None
        sampling = task.sampling
        if sampling.temperature > 0 and sampling.seed is None:
            seed = self._rng.getrandbits(63)
            task.sampling = msgspec.structs.replace(sampling, seed=seed)
        durable.accept(task, self.models.resolve(task.served_name).weights_digest)

    async def _committed(self, task: Task) -> None:
        """Wait until the task is on disk; before that it is not promised."""
        assert self.stages.durable is not None
        try:
            await self.stages.durable.committed(task)
        except TidegateError as error:
            self.end(task, refused(error))
            error.due_at = task.deadline.at
            raise
        except asyncio.CancelledError:
            if task.job.on_disconnect is OnDisconnect.CANCEL:
                self.stages.durable.refuse(task)
            self.disconnected(task)
            raise

    def require_room_for(self, job: Job, count: int, field: str) -> None:
        """Check that ``count`` tasks, which are only useful together, may be submitted; ``field``
        is their request field. Takes no units. Raises ``RateLimited`` or ``QueueFull``."""
        self.limits.require(job.key, count, job.max_tokens or 0, field)
        bound, places = self.queue.bound, self.registry.most_places(job.model)
        if bound >= 0 and places and count > bound + places:
            raise QueueFull.for_ever(
                f"{count} choices are more than can wait ({bound}) and run ({places}) at once: "
                "ask for fewer",
                field=field,
            )

    @contextmanager
    def _admitting(self, task: Task) -> Iterator[None]:
        """End the task with the error that the block raises."""
        try:
            yield
        except TidegateError as error:
            self.stages.settler.settle(task, refused(error))
            error.due_at = task.deadline.at
            raise
        except asyncio.CancelledError:
            self.stages.settler.settle(task, aborted(AbortCause.DISCONNECT))
            raise
        except Exception:
            service_log.exception(
                "admission failed", extra=fields(correlation_id=task.correlation_id)
            )
            internal = TidegateError("an internal error occurred")
            self.stages.settler.settle(task, failed(internal))
            raise internal from None

    async def _read(self, task: Task, prompt: Prompt, reading: Reading | None) -> None:
        """Run the steps that need the prompt, cheapest first. Raises the task's refusal."""
        stages = self.stages
        stages.admission.begin(task)
        stages.limits.begin(task)
        due_at = min(task.deadline.at, task.parts.cut_at)
        await stages.demand.ensure(task.job, due_at, lambda: tokens_about(prompt))
        encoder = stages.models.resolve(task.job.model)
        task.model, task.adapter = encoder.card.model, encoder.adapter
        stages.demand.needs(task)
        task.vocabulary = encoder.vocabulary
        await stages.reader.read(task, encoder, prompt, reading)
        if self.run_watch is not None:
            self.run_watch.begin(task)
        stages.admission.fit(task, encoder.card)
        if task.job.grammar is not None:
            await stages.reader.check_grammar(task, task.job.grammar, encoder.card)
        for name in ROOM_FIELDS:
            if getattr(task.job, name) and not any(name in room.keeps for room in self.rooms):
                raise InvalidRequest(f"this service does not support {name}", field=name)
        for room in self.rooms:
            room.charge(task)
        stages.limits.charge(task)
        await self.sharing.take(task)

    def cancel(self, task: Task) -> None:
        """Cancel a task on an API request. Idempotent (WP-2)."""
        self.end(task, aborted(AbortCause.CANCEL))

    def disconnected(self, task: Task, *, too_slow: bool = False) -> None:
        """Record that the task's client disconnected; its job says whether it continues (WP-1)."""
        if task.client_gone(too_slow=too_slow):
            self.end(task, aborted(AbortCause.DISCONNECT))

    def mark_reading(self, task: Task, keeps_up: bool) -> None:
        """Record whether the task's client keeps up with the stream. If not, the task keeps its
        slot only while no other task wants it (OR-11), unless it continues without its client
        anyway."""
        if task.job.on_disconnect is OnDisconnect.CANCEL:
            self.stages.dispatcher.mark_reading(task, keeps_up)

    async def loaded_model(self, job: Job) -> PromptEncoder:
        """The encoder of the job's model, which is first loaded if necessary, before the request is
        submitted. Raises ``TidegateError``; the request then counts as refused by ``submit``."""
        if self.stages.demand.must_load(job.model):
            await self._load(job)
        with self.counting_refusal(job):
            return self.models.resolve(job.model)

    @contextmanager
    def counting_refusal(self, job: Job) -> Iterator[None]:
        """Count a request that ends before ``submit`` as refused."""
        try:
            yield
        except (TidegateError, asyncio.CancelledError):
            with self._admitting(self._take(job)):
                raise

    async def _load(self, job: Job) -> None:
        """Load a model for a request; a placeholder task makes the load visible and cancellable."""
        task = Task(self.ids.new(), job)
        self._enter(task)
        try:
            self.stages.admission.require_open()
            with self.limits.counted(job.key, requests=0), _leaving_when_ended(task):
                await self.stages.demand.ensure(job)
        except (Exception, asyncio.CancelledError):
            self._count(task)
            with self._admitting(task):
                raise
        finally:
            self._live.pop(task, None)

    @property
    def live_tasks(self) -> int:
        return len(self._live) + sum(1 for room in self.rooms for _ in room.live())

    def live(self) -> Iterator[Task]:
        """All live tasks of all routes, newest first."""
        return reversed(self._live)

    def end_hopeless(self, by: float) -> int:
        """End waiting work without tokens that will probably not finish by ``by``, when the service
        shuts down. Returns the number of ended items."""
        schedule = self.stages.prediction.schedule
        now, ended = self.clock.now(), sum(room.end_hopeless(by) for room in self.rooms)
        for task in list(self.queue):
            if not task.completion_tokens and schedule.left_ms(task) > 1000 * (by - now):
                self._end_for_drain(task)
                ended += 1
        return ended

    def end_all(self) -> None:
        """End all live work for a shutdown; durable tasks are left to the next process."""
        for room in self.rooms:
            room.end_all()
        for task in list(self._live):
            self._end_for_drain(task)
        self.stages.demand.abandon()

    def _end_for_drain(self, task: Task) -> None:
        is_left = self.stages.durable is not None and self.stages.durable.leave(task)
        error = Draining("the service is shutting down; try again elsewhere")
        # A task left to the next process has no outcome yet: do not count this end.
        self.end(task, failed(error) if is_left else lost(task, error), is_left=is_left)

    def end(self, task: Task, ending: Ending, *, is_left: bool = False) -> None:
        """End live work; idempotent. ``is_left``: the next process continues it."""
        if self.stages.settler.settle(task, ending, is_left=is_left):
            self.stages.dispatcher.withdraw(task)

    def _ended(self, task: Task) -> None:
        self._live.pop(task, None)
        self.task_over.set()
        for call in self.on_ended:
            call(task)


@contextmanager
def _leaving_when_ended(task: Task) -> Iterator[None]:
    """Cancel the block's wait when the task ends, and raise the task's error."""
    waiting = asyncio.current_task()
    assert waiting is not None
    before, stopped = waiting.cancelling(), False

    def stop(ended: Task) -> None:
        nonlocal stopped
        stopped = True
        waiting.cancel()

    task.on_end.append(stop)
    try:
        yield
    except asyncio.CancelledError:
        if not stopped or waiting.uncancel() > before:
            raise
        assert task.ending is not None and task.ending.error is not None
        raise task.ending.error from None
    finally:
        task.on_end.remove(stop)
