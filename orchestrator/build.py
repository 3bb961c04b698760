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
from orchestrator.instances.discovery import DiscoverySync, source_of
from orchestrator.instances.metrics import INSTANCES, REPORTED, TOTALS
from orchestrator.instances.monitor import InstanceMonitor
from orchestrator.instances.needed import NEED, Need
from orchestrator.instances.registry import LaneMaker, Registry
from orchestrator.instances.served_models import ServedModels
from orchestrator.lanes import make_lane as make_any_lane
from orchestrator.lanes.swap_call import ask_for_swap
from orchestrator.lifecycle import Lifecycle
from orchestrator.loading.demand import DemandConfig, ModelDemand
from orchestrator.loading.metrics import DEMAND, SWAPS
from orchestrator.loading.swaps import Swaps
from orchestrator.parsing import FormatConfig
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
from orchestrator.settings.derived import feasibility_config
from orchestrator.sharing import Sharing
from orchestrator.stages import ServiceConfig, Stages
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.file import JournalFile
from orchestrator.tasks.metrics import JOURNAL, TaskMetrics
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Task, TaskStore
from orchestrator.tasks.tracing import open_tracing
from orchestrator.telemetry.metrics import KEPT, Kept, Metrics

KEPT_TASKS = Retention(keep_count=1000, keep_s=600.0, keep_bytes=128 * 2**20)
"""Limits on ended tasks that are kept for replay. A token takes 104 bytes; with the 20 most likely
alternatives, 2.6 KB."""
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
    pausing: Pausing
    reloader: Reloader


@dataclass(frozen=True, slots=True)
class _Common:
    """The inputs of every part."""

    settings: Settings
    clock: Clock
    rng: random.Random
    metrics: Metrics
    executor: ThreadPoolExecutor
    queue: TaskQueue[Task]


@dataclass(frozen=True, slots=True)
class _Instances:
    """The parts that track instances and their models."""

    registry: Registry
    models: ServedModels
    monitor: InstanceMonitor
    discovery: DiscoverySync


@dataclass(frozen=True, slots=True)
class _Foresight:
    """The parts that predict when work starts and ends."""

    forecaster: Forecaster
    placer: Placer
    in_flight: AttemptsInFlight
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """The parts that send work to instances and handle its results."""

    dispatcher: Dispatcher
    retrier: Retrier
    pausing: Pausing


def build(
    settings: Settings,
    clock: Clock,
    rng: random.Random,
    *,
    make_lane: LaneMaker | None = None,
    file: JournalFile | None = None,
    sharing: Sharing | None = None,
) -> Components:
    """One orchestrator, not started yet. ``file`` stores durable tasks, unless ``sharing`` has its
    own store."""
    sharing = Sharing() if sharing is None else sharing
    keys = keys_of(settings)
    queue: TaskQueue[Task] = TaskQueue(
        settings.queue.max_waiting, ORDERS[settings.queue.order], settings.queue.when_full
    )
    # One more thread than prompts need: it prepares the tokenizer of a new model card.
    executor = ThreadPoolExecutor(ENCODING_THREADS + 1, thread_name_prefix="tidegate-tokens")
    metrics = Metrics()
    common = _Common(settings, clock, rng, metrics, executor, queue)
    instances = _instances(common, make_lane)
    registry = instances.registry
    settler = Settler(TaskMetrics(metrics, clock), clock)
    foresight = _foresight(common, registry)
    admission = Admission(
        registry, queue, foresight.placer, foresight.prediction, clock, _admission(settings)
    )
    dispatch = _dispatch(common, registry, foresight, settler)
    store = sharing.store(file)
    durable = None if store is None else DurableTasks(store, clock)
    health = HealthBoard(registry, instances.models, queue, admission, sharing, durable)
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
    swaps, demand = _loading(common, registry, foresight)
    reloader = Reloader(settings)
    kept_tasks = TaskStore(clock, KEPT_TASKS)
    encoding = EncodingStage(executor, ENCODING_THREADS, MAX_ENCODING_BYTES, clock)
    stages = Stages(
        limits=limiter,
        registry=registry,
        models=instances.models,
        reader=PromptReader(registry, encoding, clock),
        prediction=foresight.prediction,
        admission=admission,
        queue=queue,
        dispatcher=dispatch.dispatcher,
        settler=settler,
        store=kept_tasks,
        swaps=swaps,
        demand=demand,
        durable=durable,
        sharing=sharing,
    )
    service = ServiceConfig(
        settings.deadlines,
        isolate_tenants=_isolates_tenants(settings),
        learns_runs=settings.dispatch.learn_runs,
    )
    tracing = open_tracing(settings.telemetry.otlp_endpoint, clock)
    orchestrator = Orchestrator(stages, service, metrics, clock, rng, rooms, tracing)
    metrics.watch(metrics.holders, KEPT)
    metrics.keeps("tasks", kept_tasks.kept)
    lengths = foresight.forecaster.lengths
    metrics.keeps("lengths", lambda: Kept(len(lengths), lengths.total_bytes))
    metrics.watch(queue, QUEUE)
    metrics.watch(registry, (*INSTANCES, *REPORTED, *TOTALS))
    need = Need(registry, queue, clock)
    orchestrator.on_ended.append(need.ended)
    metrics.watch(need, NEED)
    sharing.follow(orchestrator.runs, metrics)
    recovery = None
    if store is not None and durable is not None:
        metrics.watch(durable, JOURNAL)
        recovery = Recovery(orchestrator, durable, store.unfinished)
    _follow(reloader, orchestrator, instances.discovery, health)
    return Components(
        settings=settings,
        api=_api(settings, keys),
        orchestrator=orchestrator,
        lifecycle=Lifecycle(
            orchestrator, health, instances.discovery, instances.monitor, executor, recovery
        ),
        health=health,
        discovery=instances.discovery,
        monitor=instances.monitor,
        forecaster=foresight.forecaster,
        placer=foresight.placer,
        retrier=dispatch.retrier,
        pausing=dispatch.pausing,
        reloader=reloader,
    )


def _instances(common: _Common, make_lane: LaneMaker | None) -> _Instances:
    settings, clock = common.settings, common.clock
    listed = tuple(entry for entry in settings.instances if not is_source(entry))
    registry = Registry(
        listed,
        settings.lanes,
        clock,
        common.rng,
        make_lane or make_any_lane,
        max_backlog=MOST_BACKLOG,
    )
    models = ServedModels(
        registry, common.executor, special_in_prompts=settings.models.special_tokens_in_prompts
    )
    monitor = InstanceMonitor(
        registry,
        models,
        clock,
        common.metrics.histogram(
            "per_token_emission_latency_us",
            "From a frame's decoding to its tokens being written, per token (sampled)",
        ),
    )
    discovery = DiscoverySync(
        registry,
        listed,
        [source_of(entry) for entry in settings.instances if is_source(entry)],
        clock,
    )
    return _Instances(registry, models, monitor, discovery)


def _foresight(common: _Common, registry: Registry) -> _Foresight:
    settings, clock, metrics = common.settings, common.clock, common.metrics
    policy = settings.placement.policy
    forecaster = Forecaster(registry.capacity)
    placer = Placer(
        registry,
        clock,
        forecaster.usual_tokens,
        Policy.compile(policy, now=clock.now) if policy else None,
    )
    in_flight = AttemptsInFlight()
    schedule = Schedule(common.queue, forecaster, in_flight, clock)
    promises = Promises(forecaster, clock)
    quotes = Quotes(forecaster, schedule, promises, clock)
    feasibility = Feasibility(
        forecaster,
        schedule,
        promises,
        clock,
        common.rng,
        feasibility_config(settings),
    )
    prediction = Prediction(forecaster, schedule, promises, quotes, feasibility)
    metrics.watch(feasibility.stats, refusals("", "requests"))
    metrics.watch(promises, PROMISES)
    metrics.watch(quotes, QUOTES)
    metrics.watch(placer, PLACEMENT)
    if placer.policy is not None:
        metrics.watch(placer.policy, POLICY)
    return _Foresight(forecaster, placer, in_flight, prediction)


def _dispatch(
    common: _Common, registry: Registry, foresight: _Foresight, settler: Settler
) -> _Dispatch:
    settings, clock, metrics = common.settings, common.clock, common.metrics
    forecaster, prediction = foresight.forecaster, foresight.prediction
    chosen = settings.dispatch
    retrier = Retrier(registry, common.rng, settings.admission.floor_ms)
    values_time = settings.queue.order is QueueOrder.SLACK
    pausing = Pausing(registry, forecaster, foresight.placer, enabled=chosen.pause and values_time)
    adapts_rows = chosen.row_policy is RowPolicy.ADAPTIVE and values_time
    rows = RowControl(registry, prediction, foresight.in_flight, clock, enabled=adapts_rows)
    prediction.schedule.may_free_row = pausing.may_free_row
    prediction.schedule.adapts_rows = rows.adapts
    limits = TimeLimits(return_margin_s=RETURN_MARGIN_S, loop_delay=LoopDelay(clock))
    launcher = Launcher(registry, foresight.in_flight, pausing, prediction, retrier, limits, clock)
    completion = Completion(registry, settler, DispatchMetrics(metrics), prediction, retrier, clock)
    dispatcher = Dispatcher(common.queue, foresight.placer, prediction, launcher, completion, clock)
    dispatcher.on_queued = partial(rows.wake, dispatcher.pump)
    registry.listen(dispatcher)
    metrics.watch(retrier, RETRIES)
    return _Dispatch(dispatcher, retrier, pausing)


def _loading(
    common: _Common, registry: Registry, foresight: _Foresight
) -> tuple[Swaps, ModelDemand]:
    settings, clock = common.settings, common.clock
    ask = partial(ask_for_swap, tls=settings.lanes.tls)
    swaps = Swaps(registry, common.queue, ask, clock, token=settings.lanes.shown_token)
    demand = ModelDemand(
        registry,
        common.queue,
        foresight.in_flight,
        foresight.prediction,
        swaps,
        clock,
        DemandConfig(
            enabled=settings.loading.on_demand,
            refuses=settings.admission.mode is AdmissionMode.ENFORCE,
        ),
    )
    common.metrics.watch(swaps, SWAPS)
    common.metrics.watch(demand, DEMAND)
    return swaps, demand


def _follow(
    reloader: Reloader, orchestrator: Orchestrator, discovery: DiscoverySync, health: HealthBoard
) -> None:
    """Register the settings that a reload changes in a running service. The API follows keys
    itself."""
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


def _api(settings: Settings, keys: tuple[Key, ...]) -> ApiConfig:
    return ApiConfig(
        keys,
        settings.http,
        settings.streams.keepalive_s,
        FormatConfig(settings.models.tool_format, settings.models.reasoning_format),
        settings.models.aliases,
    )


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
