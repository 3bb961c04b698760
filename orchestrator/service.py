"""Takes a request through its stages. Everything that an API may ask of the service is here."""

import asyncio
import random
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from orchestrator.admission.admission import Admission, AdmissionConfig
from orchestrator.admission.rate_limits import limiter_of
from orchestrator.clock import Clock
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.hedge import Hedger
from orchestrator.dispatch.pausing import Pausing
from orchestrator.dispatch.retry import Retrier, RetryConfig
from orchestrator.errors import DeadlineExceeded, Draining, QueueFull, TidegateError
from orchestrator.health import HealthBoard
from orchestrator.instances.discovery import Roster, source_of
from orchestrator.instances.discovery.addresses import is_source
from orchestrator.instances.metrics import FleetCollector
from orchestrator.instances.monitor import InstanceMonitor, MonitorConfig
from orchestrator.instances.registry import LaneMaker, Registry, RegistryConfig
from orchestrator.instances.served_models import ServedModels
from orchestrator.lanes import Lane, LaneConfig
from orchestrator.placement import Placer
from orchestrator.placement.policy import Policy
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.refusals import Refusals
from orchestrator.prompts import EncodingStage, Steps
from orchestrator.prompts.encoder import INLINE_NAME_TOKENS, PromptEncoder, bytes_of, is_short
from orchestrator.queue.order import AdmissionMode, QueueOrder
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.settings import Settings
from orchestrator.tasks.deadline import DeadlineConfig, Part
from orchestrator.tasks.journal.memory import Journal
from orchestrator.tasks.settle import Settler, Verdict, aborted, failed, refused
from orchestrator.tasks.store import TaskStore
from orchestrator.tasks.task import Job, Listener, OnDisconnect, Prompt, Task
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import Metrics
from worker.protocol import AbortCause

T = TypeVar("T")

ENCODING_THREADS = 2
LOOK_EVERY_S = 0.25
LAST_WORDS_S = 0.5
"""How long the end waits for workers to confirm that cancelled jobs are gone."""


class Orchestrator:
    """The stages, wired up. One per process."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        rng: random.Random,
        journal: Journal,
        *,
        make_lane: LaneMaker = Lane,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.started_unix = int(clock.unix())
        self.metrics = Metrics()
        self.limits = limiter_of(settings, clock)
        self.queue: TaskQueue[Task] = TaskQueue(settings.queue_size, settings.queue_order)
        self.deadlines = DeadlineConfig(
            default_s=settings.default_deadline_s, max_s=settings.max_deadline_s
        )
        self.store = TaskStore(
            clock,
            max_tasks=settings.keep_tasks,
            max_age_s=settings.keep_tasks_s,
            max_tokens=settings.keep_tokens,
            max_bytes=settings.keep_bytes,
        )
        self._rng = rng
        # One thread more than encode: a card's tokenizer is made ready there too.
        self._executor = ThreadPoolExecutor(
            ENCODING_THREADS + 1, thread_name_prefix="tidegate-tokens"
        )
        self._encoding = EncodingStage(
            self._executor, ENCODING_THREADS, settings.max_encoding_bytes, clock
        )
        listed = tuple(entry for entry in settings.instances if not is_source(entry))
        self.registry = Registry(
            listed,
            RegistryConfig(
                lanes_per_instance=settings.lanes_per_instance,
                max_backlog=settings.worker_backlog,
                lane=LaneConfig(
                    open_timeout_s=settings.lane_open_timeout_s,
                    keepalive_s=settings.lane_keepalive_s,
                    reconnect_min_s=settings.reconnect_min_s,
                    reconnect_max_s=settings.reconnect_max_s,
                    token=settings.lane_token.get_secret_value() if settings.lane_token else "",
                ),
            ),
            clock,
            rng,
            make_lane,
        )
        self.models = ServedModels(
            self.registry, self._executor, special_in_prompts=settings.special_tokens_in_prompts
        )
        self.monitor = InstanceMonitor(
            self.registry,
            self.models,
            MonitorConfig(settings.suspect_after_s, settings.down_after_s),
            clock,
            self.metrics.emission_us,
        )
        self._settler = Settler(self.metrics, journal, clock)
        self.forecaster = Forecaster(
            self.registry.capacity,
            drops_infeasible=(
                settings.drop_infeasible and settings.admission is AdmissionMode.ENFORCE
            ),
        )
        policy = settings.placement_policy
        self.placer = Placer(
            self.registry,
            clock,
            self.forecaster.usual_tokens,
            Policy.compile(policy, now=clock.now) if policy else None,
        )
        self.roster = Roster(
            self.registry,
            listed,
            [source_of(entry) for entry in settings.instances if is_source(entry)],
            clock,
            read_every_s=settings.read_instances_every_s,
            grace_s=settings.leave_grace_s,
        )
        self._admission = Admission(
            self.registry,
            self.queue,
            self.forecaster,
            self.placer,
            clock,
            rng,
            AdmissionConfig(
                floor_ms=settings.admission_floor_ms,
                default_max_tokens=settings.default_max_tokens,
                mode=settings.admission,
                queue_policy=settings.queue_policy,
                refusal_cap=settings.refusal_cap,
                sample=settings.refusal_sample,
            ),
            drop=self._drop,
            sweep=lambda: self._dispatcher.pump(),
        )
        self._isolate_tenants = settings.isolate_tenants
        self.retrier = Retrier(
            self.registry,
            self.registry.capacity,
            rng,
            RetryConfig(
                share=settings.retry_share,
                attempts=settings.attempts,
                floor_ms=settings.admission_floor_ms,
            ),
        )
        self.hedger = Hedger(
            self.registry, self.forecaster.usual_tokens, share=settings.hedge_share
        )
        self.pausing = Pausing(
            self.registry,
            self.forecaster,
            self.placer,
            # Work that runs on past its deadline would never be worth its slot.
            enabled=settings.pause
            and settings.queue_order is QueueOrder.SLACK
            and settings.deadline_scope == "request",
        )
        self._dispatcher = Dispatcher(
            self.registry,
            self.queue,
            self._settler,
            self.metrics,
            clock,
            grace_ms=settings.deadline_grace_ms,
            return_margin_ms=settings.return_margin_ms,
            forecaster=self.forecaster,
            placer=self.placer,
            refuses_late=self._admission.refuses_late,
            infeasible=self._admission.infeasible,
            retrier=self.retrier,
            hedger=self.hedger,
            pausing=self.pausing,
            outlook=self._admission.outlook,
            refusals=self._admission.refusals,
            lets_run_s=settings.max_deadline_s if settings.deadline_scope == "queue" else None,
        )
        self.health = HealthBoard(self.registry, self.models, self.queue, self._admission)
        self.metrics.watch(self.registry, self.queue, self.refusals, self.placer)
        self.metrics.registry.register(
            FleetCollector(self.registry, self.retrier, self.hedger.stats)
        )
        self._live: set[Task] = set()
        self._task_over = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    # ── work ─────────────────────────────────────────────────────────────────────────────────

    async def submit(self, job: Job, prompt: Prompt, listeners: Sequence[Listener] = ()) -> Task:
        """Offer a request. Returns once it is queued or on its way; raises why it was refused.

        Whatever happens, the request is counted as offered and ends in exactly one outcome.
        ``listeners`` hear all of it but a refusal, which is raised.
        """
        task = Task(self._new_id(), job)
        task.cache_salt = job.tenant if self._isolate_tenants else ""
        self.metrics.offered.labels(job.api).inc()
        self._live.add(task)
        task.on_end.append(self._forget)
        try:
            self._admission.begin(task)
            self.limits.begin(task)
            encoder = self.models.resolve(job.model)
            task.model = encoder.card.model
            task.vocabulary = encoder.vocabulary
            task.token_ids = await self._encode(task, encoder, prompt)
            task.prompt_tokens = len(task.token_ids)
            task.block_tokens = encoder.card.block_tokens
            if self.registry.prefixes:
                task.prefix_names = await self._prefix_names(task, encoder)
            self._admission.fit(task, encoder.card)
            self.limits.charge(task)
            self._admission.finish(task)
        except TidegateError as error:
            self._settler.settle(task, refused(error))
            raise
        except asyncio.CancelledError:
            self._settler.settle(task, aborted(AbortCause.DISCONNECT))
            raise
        except Exception:
            service_log.exception(
                "a request could not be admitted", extra=fields(correlation_id=task.correlation_id)
            )
            internal = TidegateError("an internal error occurred")
            self._settler.settle(task, failed(internal))
            raise internal from None
        if task.ending is not None:  # the service began to go down while the prompt was encoded
            assert task.ending.error is not None
            raise task.ending.error
        if job.keep:
            self.store.add(task)
        for listener in listeners:
            task.listen(listener)
        self._dispatcher.enqueue(task)
        return task

    async def _encode(self, task: Task, encoder: PromptEncoder, prompt: Prompt) -> Sequence[int]:
        if is_short(prompt):
            return encoder.encode(prompt, ids_field=task.job.api.ids_field)
        return await self._in_steps(task, encoder.steps(prompt), bytes_of(prompt))

    async def _prefix_names(self, task: Task, encoder: PromptEncoder) -> Sequence[bytes]:
        ids, salt = task.token_ids, task.cache_salt
        if len(ids) <= INLINE_NAME_TOKENS:
            return encoder.prefix_names(ids, salt)
        return await self._in_steps(task, encoder.names_in_steps(ids, salt), 8 * len(ids))

    async def _in_steps(self, task: Task, steps: Steps[T], size: int) -> T:
        """On a thread, for as long as it is of use."""
        due_at = min(task.deadline.at, task.parts.cut_at)
        try:
            return await self._encoding.run(steps, size, due_at)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed before the prompt was encoded; send less, or token ids",
                exceeded_by_ms=1000 * (self.clock.now() - due_at),
                part=Part.FIRST_TOKEN if task.parts.cut_at < task.deadline.at else "",
            ) from None

    def cancel(self, task: Task) -> None:
        """Stop a task for whoever asked through the API. Idempotent (WP-2)."""
        self._end(task, aborted(AbortCause.CANCEL))

    def disconnected(self, task: Task, *, too_slow: bool = False) -> None:
        """The task's client is gone; what becomes of it is the task's own wish (WP-1)."""
        if task.ending is not None:
            return
        service_log.info(
            "client too slow" if too_slow else "client disconnected",
            extra=fields(task_id=task.id, correlation_id=task.correlation_id),
        )
        if task.job.on_disconnect is OnDisconnect.CANCEL:
            self._end(task, aborted(AbortCause.DISCONNECT))

    def reads(self, task: Task, does: bool) -> None:
        """Whether the task's client keeps up with what is sent. One that does not keeps its slot
        only while nobody else wants it (OR-11), unless its work is to go on without it anyway.
        """
        if task.job.on_disconnect is OnDisconnect.CANCEL:
            self._dispatcher.reads(task, does)

    def queue_position(self, task: Task) -> int:
        """How many tasks start before this one; 0 once it has started."""
        return self.queue.position(task) or 0

    def predicted_start_ms(self, task: Task) -> float:
        """From now; 0 once it is on its way."""
        return self._admission.outlook.start_ms(task) if task in self.queue else 0.0

    def model(self, name: str) -> PromptEncoder:
        """The model of that name. Raises ``NotReady`` or ``ModelNotFound``."""
        return self.models.resolve(name)

    @property
    def refusals(self) -> Refusals:
        """What was decided against, and what becomes of the sample that is kept (DL-17)."""
        return self._admission.refusals

    @property
    def live_tasks(self) -> int:
        """Tasks that have not ended."""
        return len(self._live)

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Connect to every instance and keep an eye on them."""
        self.registry.start(self.monitor)
        self.roster.start()
        self._looking = asyncio.create_task(self._look())

    def refuse_new_work(self) -> None:
        """From now on every offer is answered with 503 ``draining`` (OR-14)."""
        self._admission.draining = True
        self.health.refresh()

    async def finish(self, grace_s: float) -> None:
        """Let live tasks end within ``grace_s``, end the rest, and leave no work on any worker."""
        began = self.clock.now()
        self.refuse_new_work()
        await _until(lambda: not self._live, self._task_over, grace_s)
        for task in list(self._live):
            self._end(task, failed(Draining("the service is going down; try again elsewhere")))
        lanes = [lane for instance in self.registry for lane in instance.lanes]
        await _until(
            lambda: not any(lane.load for lane in lanes),
            self._dispatcher.attempts_done,
            LAST_WORDS_S,
        )
        self.metrics.shutdown_ms.set(1000 * (self.clock.now() - began))

    async def close(self) -> None:
        """Close every lane and thread. Call ``finish`` before."""
        if self._looking is not None:
            self._looking.cancel()
        await self.roster.close()
        self.monitor.close()
        await self.registry.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self.monitor.check_heartbeats()
                self._dispatcher.look()
                await self.roster.sweep()
                self.store.prune()
                self.health.refresh()
            except Exception:
                service_log.exception("looking after the instances failed; trying again")

    def _drop(self, task: Task, error: QueueFull) -> None:
        self._end(task, refused(error))

    def _end(self, task: Task, verdict: Verdict) -> None:
        if self._settler.settle(task, verdict):
            self._dispatcher.withdraw(task)

    def _forget(self, task: Task) -> None:
        self._live.discard(task)
        self._task_over.set()

    def _new_id(self) -> str:
        return uuid.UUID(int=self._rng.getrandbits(128), version=4).hex


async def _until(done: Callable[[], bool], changed: asyncio.Event, limit_s: float) -> None:
    """Wait until ``done``, which is asked after each ``changed``, but no longer than the limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not done():
                changed.clear()
                await changed.wait()
