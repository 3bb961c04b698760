"""The composition root: builds all parts from the settings. Only it knows every part."""

import hashlib
import logging
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from orchestrator.admission.admission import Admission, AdmissionConfig
from orchestrator.admission.rate_limits import Limiter, Limits, RateLimitConfig
from orchestrator.admission.reader import PromptReader
from orchestrator.api.auth import Key, digest_of
from orchestrator.api.config import ApiConfig
from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import AttemptsInFlight
from orchestrator.dispatch.completion import Completion
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.launch import Launcher
from orchestrator.dispatch.metrics import RETRIES, DispatchMetrics
from orchestrator.dispatch.pausing import Pausing
from orchestrator.dispatch.retry import Retrier
from orchestrator.dispatch.rows import RowControl
from orchestrator.dispatch.time_limits import RETURN_MARGIN_S, LoopDelay, TimeLimits
from orchestrator.extension import Core, build_rooms
from orchestrator.health import HealthBoard
from orchestrator.instances.addresses import is_source
from orchestrator.instances.concurrency import MOST_BACKLOG
from orchestrator.instances.discovery import DiscoverySync, DnsName
from orchestrator.instances.metrics import INSTANCES, REPORTED, TOTALS
from orchestrator.instances.monitor import InstanceMonitor
from orchestrator.instances.needed import NEED, Need
from orchestrator.instances.registry import LaneMaker, Registry
from orchestrator.instances.served_models import ServedModels
from orchestrator.lanes import make_lane as make_any_lane
from orchestrator.lanes.swap_call import ask_for_swap
from orchestrator.lifecycle import Lifecycle
from orchestrator.loading.demand import DEMAND, ModelDemand
from orchestrator.loading.swaps import SWAPS, Swaps
from orchestrator.parsing.formats import FormatConfig
from orchestrator.placement.placer import PLACEMENT, POLICY, Placer
from orchestrator.placement.policy import Policy
from orchestrator.prediction.feasibility import AdmissionMode, Feasibility
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.metrics import PROMISES, QUOTES, refusals
from orchestrator.prediction.prediction import Prediction
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.quotes import Quotes
from orchestrator.prediction.schedule import Schedule
from orchestrator.prompts.stage import EncodingStage
from orchestrator.queue.order import ORDERS, QueueOrder, RowPolicy
from orchestrator.queue.task_queue import QUEUE, TaskQueue
from orchestrator.recovery import Recovery
from orchestrator.reload import Reloader
from orchestrator.retention import Retention
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.sharing import Sharing
from orchestrator.stages import Stages
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.file import JournalFile
from orchestrator.tasks.metrics import JOURNAL, TaskMetrics
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Task, TaskStore
from orchestrator.tasks.tracing import open_tracing
from orchestrator.telemetry.metrics import KEPT, Kept, Metrics

KEPT_TASKS = Retention(keep_count=1000, keep_s=600.0, keep_bytes=128 * 2**20)
"""Limits on ended tasks kept for replay. A token takes 104 bytes; with 20 alternatives, 2.6 KB."""
ENCODING_THREADS = 2
MAX_ENCODING_BYTES = 64 * 2**20
"""Maximum total bytes of the prompts that wait for encoding."""
KEY_SETTINGS = ("token", "admin_token", "keys")


@dataclass(frozen=True, slots=True)
class Components:
    """One orchestrator's parts, for servers, simulations and tests."""

    settings: Settings
    api: ApiConfig
    orchestrator: Orchestrator
    lifecycle: Lifecycle
    health: HealthBoard
    discovery: DiscoverySync
    monitor: InstanceMonitor
    forecaster: Forecaster
    placer: Placer
    retrier: Retrier
    reloader: Reloader


def build(
    settings: Settings,
    clock: Clock,
    rng: random.Random,
    *,
    make_lane: LaneMaker | None = None,
    file: JournalFile | None = None,
    sharing: Sharing | None = None,
) -> Components:
    """One orchestrator, not started. ``file`` has durable tasks, unless ``sharing`` has a store."""
    sharing = Sharing() if sharing is None else sharing
    keys = keys_of(settings)
    metrics = Metrics()
    queue: TaskQueue[Task] = TaskQueue(
        settings.queue.max_waiting, ORDERS[settings.queue.order], settings.queue.when_full
    )
    # One more thread than prompts need: it prepares the tokenizer of a new model card.
    executor = ThreadPoolExecutor(ENCODING_THREADS + 1, thread_name_prefix="tidegate-tokens")

    # Instances and their models
    listed = tuple(entry for entry in settings.instances if not is_source(entry))
    sources = [DnsName(entry) for entry in settings.instances if is_source(entry)]
    lane_maker = make_lane or make_any_lane
    registry = Registry(listed, settings.lanes, clock, rng, lane_maker, max_backlog=MOST_BACKLOG)
    special_in_prompts = settings.models.special_tokens_in_prompts
    models = ServedModels(registry, executor, special_in_prompts=special_in_prompts)
    emission_us = metrics.histogram(
        "per_token_emission_latency_us",
        "From a frame's decoding to its tokens being written, per token (sampled)",
    )
    monitor = InstanceMonitor(registry, models, clock, emission_us)
    discovery = DiscoverySync(registry, listed, sources, clock)
    need = Need(registry, queue, clock)

    # When work starts and ends
    policy = settings.placement.policy
    forecaster = Forecaster(registry.capacity)
    compiled = Policy.compile(policy, now=clock.now) if policy else None
    placer = Placer(registry, clock, forecaster.usual_tokens, compiled)
    in_flight = AttemptsInFlight()
    schedule = Schedule(queue, forecaster, in_flight, clock)
    promises = Promises(forecaster, clock)
    quotes = Quotes(forecaster, schedule, promises, clock)
    feasibility = Feasibility(
        forecaster, schedule, promises, clock, rng, settings.admission.feasibility
    )
    prediction = Prediction(forecaster, schedule, promises, quotes, feasibility)
    admission = Admission(registry, placer, prediction, clock, _admission(settings))

    # From the queue to instances, and back
    chosen = settings.dispatch
    settler = Settler(TaskMetrics(metrics, clock), clock)
    retrier = Retrier(registry, rng, settings.admission.floor_ms)
    values_time = settings.queue.order is QueueOrder.SLACK
    pausing = Pausing(registry, forecaster, placer, enabled=chosen.pause and values_time)
    adapts_rows = chosen.row_policy is RowPolicy.ADAPTIVE and values_time
    rows = RowControl(registry, prediction, in_flight, clock, enabled=adapts_rows)
    schedule.may_free_row = pausing.may_free_row
    schedule.may_get_row = lambda task: pausing.may_get_row(task, clock.now())
    schedule.adapts_rows = rows.adapts
    limits = TimeLimits(return_margin_s=RETURN_MARGIN_S, loop_delay=LoopDelay(clock))
    launcher = Launcher(registry, in_flight, pausing, prediction, retrier, limits, clock)
    completion = Completion(registry, settler, DispatchMetrics(metrics), prediction, retrier, clock)
    dispatcher = Dispatcher(queue, placer, prediction, launcher, completion, clock)
    dispatcher.on_queued = partial(rows.wake, dispatcher.pump)
    registry.listen(dispatcher.instances_changed)
    ask = partial(ask_for_swap, tls=settings.lanes.tls)
    swaps = Swaps(registry, queue, ask, clock, token=settings.lanes.shown_token)
    demand = ModelDemand(registry, queue, in_flight, prediction, swaps, clock)
    demand.is_enabled = settings.loading.on_demand
    demand.refuses = settings.admission.mode is AdmissionMode.ENFORCE

    # The service and its optional rooms
    store = sharing.store(file)
    durable = None if store is None else DurableTasks(store, clock)
    health = HealthBoard(registry, models, queue, admission, sharing, durable)
    health.has_tenants = _has_tenants(settings)
    limiter = Limiter(_rate_limits(settings, keys), clock)
    sharing.share(registry, queue, limiter)
    rooms = build_rooms(
        Core(
            settings=settings,
            clock=clock,
            rng=rng,
            metrics=metrics,
            registry=registry,
            admission=admission,
            limiter=limiter,
            sharing=sharing,
            journal=file,
            is_simulated=make_lane is not None,
        )
    )
    health.also_ready.extend(room.is_ready for room in rooms)
    kept_tasks = TaskStore(clock, KEPT_TASKS)
    encoding = EncodingStage(executor, ENCODING_THREADS, MAX_ENCODING_BYTES, clock)
    stages = Stages(
        limits=limiter,
        registry=registry,
        models=models,
        reader=PromptReader(registry, encoding, clock),
        prediction=prediction,
        admission=admission,
        queue=queue,
        dispatcher=dispatcher,
        settler=settler,
        store=kept_tasks,
        swaps=swaps,
        demand=demand,
        durable=durable,
        sharing=sharing,
    )
    tracing = open_tracing(settings.telemetry.otlp_endpoint, clock)
    orchestrator = Orchestrator(stages, settings, metrics, clock, rng, rooms, tracing)
    orchestrator.isolate_tenants = _isolates_tenants(settings)
    orchestrator.on_ended.append(need.ended)
    sharing.follow(orchestrator.runs, metrics)
    recovery = None
    if store is not None and durable is not None:
        recovery = Recovery(orchestrator, durable, store.unfinished)
        metrics.watch(durable, JOURNAL)
    reloader = Reloader(settings)
    _follow(reloader, orchestrator, discovery, health)

    metrics.keeps("tasks", kept_tasks.kept)
    lengths = forecaster.lengths
    metrics.keeps("lengths", lambda: Kept(len(lengths), lengths.total_bytes))
    metrics.watch(metrics.holders, KEPT)
    metrics.watch(queue, QUEUE)
    metrics.watch(registry, (*INSTANCES, *REPORTED, *TOTALS))
    metrics.watch(need, NEED)
    metrics.watch(feasibility.stats, refusals("", "requests"))
    metrics.watch(promises, PROMISES)
    metrics.watch(quotes, QUOTES)
    metrics.watch(placer, PLACEMENT)
    if placer.policy is not None:
        metrics.watch(placer.policy, POLICY)
    metrics.watch(retrier, RETRIES)
    metrics.watch(swaps, SWAPS)
    metrics.watch(demand, DEMAND)
    formats = FormatConfig(settings.models.tool_format, settings.models.reasoning_format)
    return Components(
        settings=settings,
        api=ApiConfig(
            keys, settings.http, settings.streams.keepalive_s, formats, settings.models.aliases
        ),
        orchestrator=orchestrator,
        lifecycle=Lifecycle(orchestrator, health, discovery, monitor, executor, recovery),
        health=health,
        discovery=discovery,
        monitor=monitor,
        forecaster=forecaster,
        placer=placer,
        retrier=retrier,
        reloader=reloader,
    )


def _follow(
    reloader: Reloader, orchestrator: Orchestrator, discovery: DiscoverySync, health: HealthBoard
) -> None:
    """Register the settings that a reload changes. The API follows keys itself."""
    stages = orchestrator.stages
    instances = reloader.settings.instances
    sources = [entry for entry in instances if is_source(entry)]

    def limit(new: Settings) -> None:
        stages.limits.replace(_rate_limits(new, keys_of(new)))

    def list_instances(new: Settings) -> None:
        if [entry for entry in new.instances if is_source(entry)] != sources:
            raise ValueError("sources of instances cannot change while the service runs")
        discovery.list_anew(entry for entry in new.instances if not is_source(entry))

    def admit(new: Settings) -> None:
        stages.admission.config = _admission(new)

    def set_deadlines(new: Settings) -> None:
        orchestrator.deadlines = new.deadlines

    def isolate(new: Settings) -> None:
        orchestrator.isolate_tenants = _isolates_tenants(new)
        health.has_tenants = _has_tenants(new)

    def bound_queue(new: Settings) -> None:
        orchestrator.queue.bound = new.queue.max_waiting

    def set_log_level(new: Settings) -> None:
        logging.getLogger().setLevel(new.telemetry.log_level.upper())

    reloader.follow(("limits", *KEY_SETTINGS), limit)
    reloader.follow(("isolate_tenants", *KEY_SETTINGS), isolate)
    reloader.follow(("instances",), list_instances)
    reloader.follow(("admission.floor_ms", "admission.default_max_tokens"), admit)
    reloader.follow(("deadlines",), set_deadlines)
    reloader.follow(("queue.max_waiting",), bound_queue)
    reloader.follow(("telemetry.log_level",), set_log_level)
    # These are read at each use, so there is nothing to apply.
    reloader.follow(("shutdown",), lambda new: None)


def _admission(settings: Settings) -> AdmissionConfig:
    return AdmissionConfig(
        floor_ms=settings.admission.floor_ms,
        default_max_tokens=settings.admission.default_max_tokens,
    )


def keys_of(settings: Settings) -> tuple[Key, ...]:
    keys = []
    if settings.token is not None:
        keys.append(Key("default", digest_of(settings.token.get_secret_value())))
    if settings.admin_token is not None:
        admin = digest_of(settings.admin_token.get_secret_value())
        keys.append(Key("admin", admin, is_admin=True))
    for name, key in settings.keys.items():
        digest = bytes.fromhex(key.digest_hex)
        keys.append(Key(name, digest, key.names_tenants, key.is_admin, key.tell_time))
    return tuple(keys)


def keys_digest(settings: Settings) -> str:
    """Digest of all keys, to compare the keys of two orchestrators."""
    digests = sorted(key.digest for key in keys_of(settings))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _has_tenants(settings: Settings) -> bool:
    return len(keys_of(settings)) > 1


def _isolates_tenants(settings: Settings) -> bool:
    stated = settings.isolate_tenants
    return _has_tenants(settings) if stated is None else stated


def _rate_limits(settings: Settings, keys: Iterable[Key]) -> RateLimitConfig:
    """The rate limits of each key; a key's own limits override those for every key."""
    default = settings.limits.each_key
    by_key = {}
    for key in keys:
        own = settings.keys.get(key.tenant)
        if own is not None:
            stated = own.model_dump(include=set(Limits.model_fields), exclude_none=True)
            by_key[key.fingerprint] = default.model_copy(update=stated)
    return RateLimitConfig(settings.limits.all_keys, default, by_key)
