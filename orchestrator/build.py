"""The composition root: settings become parts, wired. Nothing else knows every part."""

import logging
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.admission.admission import Admission, AdmissionConfig
from orchestrator.admission.rate_limits import Limiter, Limits, RateLimitConfig
from orchestrator.api.auth import Key, digest_of
from orchestrator.api.config import (
    ApiConfig,
    BodyConfig,
    BrowserConfig,
    ConnectionConfig,
    GrammarConfig,
    ResponseStoreConfig,
    StreamConfig,
)
from orchestrator.batches.config import BatchConfig
from orchestrator.batches.metrics import BATCHES
from orchestrator.batches.service import Batches
from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import AttemptsInFlight
from orchestrator.dispatch.completion import Completion
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.hedge import Hedger
from orchestrator.dispatch.launch import Launcher
from orchestrator.dispatch.loop_delay import LoopDelay
from orchestrator.dispatch.metrics import HEDGES, RETRIES, DispatchMetrics
from orchestrator.dispatch.pausing import Pausing
from orchestrator.dispatch.retry import Retrier, RetryConfig
from orchestrator.dispatch.rows import RowControl
from orchestrator.dispatch.time_limits import TimeLimits
from orchestrator.health import HealthBoard
from orchestrator.instances.discovery import DiscoverySync, source_of
from orchestrator.instances.discovery.addresses import is_source
from orchestrator.instances.metrics import INSTANCES, REPORTED, TOTALS
from orchestrator.instances.monitor import InstanceMonitor, MonitorConfig
from orchestrator.instances.registry import LaneMaker, Registry, RegistryConfig
from orchestrator.instances.served_models import ServedModels
from orchestrator.lanes import LaneConfig, LaneFactory
from orchestrator.lanes.swap_call import ask_for_swap
from orchestrator.lifecycle import Lifecycle
from orchestrator.loading.demand import DemandConfig, ModelDemand
from orchestrator.loading.metrics import DEMAND, SWAPS
from orchestrator.loading.swaps import Swaps
from orchestrator.parsing import FormatConfig
from orchestrator.placement import Placer
from orchestrator.placement.metrics import PLACEMENT, POLICY
from orchestrator.placement.policy import Policy
from orchestrator.prediction.calibration import Calibration
from orchestrator.prediction.feasibility import AdmissionMode, Feasibility, FeasibilityConfig
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.metrics import CALIBRATION, refusals
from orchestrator.prediction.prediction import Prediction
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.start_times import StartTimes
from orchestrator.prompts import EncodingStage
from orchestrator.queue.metrics import QUEUE
from orchestrator.queue.order import ORDERS, QueueOrder, RowPolicy
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.recovery import Recovery
from orchestrator.reload import Reloader
from orchestrator.service import Orchestrator, ServiceConfig, Stages
from orchestrator.sessions.config import SessionConfig
from orchestrator.sessions.metrics import SESSIONS
from orchestrator.sessions.store import SessionStore
from orchestrator.settings import Settings
from orchestrator.slots.fleet import FleetConfig, SlotFleet
from orchestrator.slots.gate import SlotGate
from orchestrator.slots.ledger import FLEET, SlotLedger
from orchestrator.slots.metrics import SLOTS
from orchestrator.slots.service import Slots, SlotsConfig
from orchestrator.slots.store import SlotKeepConfig, SlotStore
from orchestrator.tasks.deadline import DeadlineConfig
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.file import JournalConfig, JournalFile
from orchestrator.tasks.journal.memory import Journal
from orchestrator.tasks.journal.metrics import JOURNAL
from orchestrator.tasks.journal.sealing import read_keys
from orchestrator.tasks.metrics import TaskMetrics
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.store import TaskStore
from orchestrator.tasks.task import Task
from orchestrator.tasks.tracing import open_tracing
from orchestrator.telemetry.metrics import Metrics

ENCODING_THREADS = 2
KEY_SETTINGS = ("token", "admin_token", "keys")


@dataclass(frozen=True, slots=True)
class Components:
    """One orchestrator's parts, for whoever serves it, simulates it or tests it."""

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
    hedger: Hedger
    pausing: Pausing
    reloader: Reloader


def build(
    settings: Settings,
    clock: Clock,
    rng: random.Random,
    journal: Journal,
    *,
    make_lane: LaneMaker | None = None,
    file: JournalFile | None = None,
) -> Components:
    """One orchestrator, not started yet. ``file`` is where durable tasks are written down."""
    metrics = Metrics()
    keys = keys_of(settings)
    queue: TaskQueue[Task] = TaskQueue(
        settings.queue_size, ORDERS[settings.queue_order], settings.queue_policy
    )
    # One thread more than encodes prompts: a new model card's tokenizer is prepared there too.
    executor = ThreadPoolExecutor(ENCODING_THREADS + 1, thread_name_prefix="tidegate-tokens")

    listed = tuple(entry for entry in settings.instances if not is_source(entry))
    lane_config = LaneConfig(
        open_timeout_s=settings.lane_open_timeout_s,
        keepalive_s=settings.lane_keepalive_s,
        reconnect_min_s=settings.reconnect_min_s,
        reconnect_max_s=settings.reconnect_max_s,
        worn_after_bytes=settings.lane_renew_after_mib * 2**20,
        token=settings.lane_token.get_secret_value() if settings.lane_token else "",
        tls=settings.triton_tls,
    )
    registry = Registry(
        listed,
        RegistryConfig(
            lanes_per_instance=settings.lanes_per_instance,
            max_backlog=settings.backlog_per_instance,
            lane=lane_config,
        ),
        clock,
        rng,
        LaneFactory() if make_lane is None else make_lane,
    )
    models = ServedModels(registry, executor, special_in_prompts=settings.special_tokens_in_prompts)
    monitor = InstanceMonitor(
        registry,
        models,
        MonitorConfig(settings.suspect_after_s, settings.down_after_s),
        clock,
        metrics.histogram(
            "per_token_emission_latency_us",
            "From a frame's decoding to its tokens being written, per token (sampled)",
        ),
    )
    discovery = DiscoverySync(
        registry,
        listed,
        [source_of(entry) for entry in settings.instances if is_source(entry)],
        clock,
        read_every_s=settings.read_instances_every_s,
        grace_s=settings.leave_grace_s,
    )
    settler = Settler(TaskMetrics(metrics, clock), journal, clock)
    forecaster = Forecaster(
        registry.capacity,
        drops_infeasible=(settings.drop_infeasible and settings.admission is AdmissionMode.ENFORCE),
    )
    policy = settings.placement_policy
    placer = Placer(
        registry,
        clock,
        forecaster.usual_tokens,
        Policy.compile(policy, now=clock.now) if policy else None,
    )
    in_flight = AttemptsInFlight()
    start_times = StartTimes(queue, forecaster, in_flight, clock)
    promises = Promises(forecaster, clock)
    feasibility = Feasibility(
        forecaster,
        start_times,
        promises,
        clock,
        rng,
        _feasibility(settings),
    )
    prediction = Prediction(forecaster, start_times, promises, feasibility, Calibration())
    admission = Admission(
        registry,
        queue,
        placer,
        prediction,
        clock,
        _admission(settings),
    )
    retrier = Retrier(
        registry,
        rng,
        RetryConfig(
            share=settings.retry_share,
            attempts=settings.attempts,
            floor_ms=settings.admission_floor_ms,
        ),
    )
    hedger = Hedger(registry, forecaster, share=settings.hedge_share)
    pausing = Pausing(
        registry,
        forecaster,
        placer,
        # A job that runs on past its deadline would never be worth its slot.
        enabled=settings.pause
        and settings.queue_order is QueueOrder.SLACK
        and settings.deadline_scope == "request",
    )
    rows = RowControl(
        pausing,
        registry,
        forecaster,
        queue,
        in_flight,
        clock,
        enabled=settings.row_policy is RowPolicy.ADAPTIVE
        and settings.queue_order is QueueOrder.SLACK
        and settings.deadline_scope == "request",
    )
    limits = TimeLimits(
        grace_s=settings.deadline_grace_ms / 1000,
        return_margin_s=settings.return_margin_ms / 1000,
        max_run_s=settings.max_deadline_s if settings.deadline_scope == "queue" else None,
        loop_delay=LoopDelay(clock),
    )
    launcher = Launcher(registry, in_flight, prediction, retrier, hedger, limits, clock)
    completion = Completion(
        registry, settler, DispatchMetrics(metrics), prediction, retrier, hedger, clock
    )
    dispatcher = Dispatcher(queue, placer, rows, prediction, launcher, completion, clock)
    registry.listen(dispatcher)
    durable = None if file is None else DurableTasks(file, clock)
    health = HealthBoard(registry, models, queue, admission, durable)
    metrics.watch(queue, QUEUE)
    metrics.watch(feasibility.stats, refusals("", "requests"))
    metrics.watch(prediction.calibration, CALIBRATION)
    metrics.watch(placer, PLACEMENT)
    if placer.policy is not None:
        metrics.watch(placer.policy, POLICY)
    metrics.watch(retrier, RETRIES)
    metrics.watch(hedger.stats, HEDGES)
    metrics.watch(registry, (*INSTANCES, *REPORTED, *TOTALS))
    store = TaskStore(
        clock,
        max_tasks=settings.keep_tasks,
        max_age_s=settings.keep_tasks_s,
        max_tokens=settings.keep_tokens,
        max_bytes=settings.keep_bytes,
    )
    sessions = SessionStore(_session_config(settings), clock, rng)
    metrics.watch(sessions, SESSIONS)
    limiter = Limiter(_rate_limits(settings, keys), clock)
    fleet = SlotFleet(
        registry,
        FleetConfig(
            lane_config,
            settings.suspect_after_s,
            settings.down_after_s,
            is_watching=make_lane is None,
        ),
        clock,
        rng,
    )
    slots = Slots(
        SlotGate(
            admission,
            limiter,
            clock,
            floor_ms=settings.admission_floor_ms,
        ),
        fleet,
        SlotLedger(metrics, clock),
        SlotStore(
            clock,
            SlotKeepConfig(settings.keep_slots, settings.keep_slots_s, settings.keep_slot_bytes),
        ),
        SlotsConfig(
            _feasibility(settings),
            queue_size=settings.slots_queue_size,
            attempts=settings.attempts,
            grace_s=settings.deadline_grace_ms / 1000,
            lane=lane_config,
        ),
        clock,
        rng,
    )
    metrics.watch(slots, SLOTS)
    metrics.watch(slots.refusals, refusals("slot_", "slots"))
    metrics.watch(fleet, FLEET)
    health.has_tenants = _has_tenants(settings)
    health.also_ready.append(lambda: bool(fleet.ready()))
    ask = partial(ask_for_swap, tls=lane_config.tls)
    swaps = Swaps(registry, queue, ask, clock, token=lane_config.token)
    metrics.watch(swaps, SWAPS)
    demand = ModelDemand(
        registry,
        queue,
        in_flight,
        forecaster,
        swaps,
        clock,
        DemandConfig(
            enabled=settings.load_on_demand,
            min_residency_s=settings.model_min_residency_s,
            waiting=settings.model_load_waiting,
            refuses=settings.admission is AdmissionMode.ENFORCE,
        ),
    )
    metrics.watch(demand, DEMAND)
    stages = Stages(
        limits=limiter,
        registry=registry,
        models=models,
        encoding=EncodingStage(executor, ENCODING_THREADS, settings.max_encoding_bytes, clock),
        prediction=prediction,
        admission=admission,
        queue=queue,
        dispatcher=dispatcher,
        settler=settler,
        store=store,
        sessions=sessions,
        swaps=swaps,
        demand=demand,
        durable=durable,
        batches=None if file is None else _batches(settings, file, clock),
        slots=slots,
    )
    service = ServiceConfig(
        _deadlines(settings),
        isolate_tenants=_isolates_tenants(settings),
        durable_default=settings.durable_default,
    )
    tracing = open_tracing(settings.otlp_endpoint, clock)
    orchestrator = Orchestrator(stages, service, metrics, clock, rng, tracing)
    if stages.batches is not None:
        metrics.watch(stages.batches, BATCHES)
    recovery = None
    if file is not None and durable is not None:
        metrics.watch(durable, JOURNAL)
        durable.observe_ms = metrics.histogram(
            "journal_commit_ms", "Transactions of the journal, until they are on the disk"
        ).observe
        recovery = Recovery(orchestrator, durable, file.unfinished)
    reloader = Reloader(settings)
    _follow(reloader, orchestrator, discovery, health)
    lifecycle = Lifecycle(orchestrator, health, discovery, monitor, executor, recovery)
    return Components(
        settings=settings,
        api=_api(settings, keys),
        orchestrator=orchestrator,
        lifecycle=lifecycle,
        health=health,
        discovery=discovery,
        monitor=monitor,
        forecaster=forecaster,
        placer=placer,
        retrier=retrier,
        hedger=hedger,
        pausing=pausing,
        reloader=reloader,
    )


def _follow(
    reloader: Reloader, orchestrator: Orchestrator, discovery: DiscoverySync, health: HealthBoard
) -> None:
    """Register what a reload of the settings changes in a running service. The API follows keys
    itself."""
    stages = orchestrator.stages
    instances = reloader.settings.instances
    sources = [entry for entry in instances if is_source(entry)]

    def limit(new: Settings) -> None:
        stages.limits.replace(_rate_limits(new, keys_of(new)))

    def list_instances(new: Settings) -> None:
        if [entry for entry in new.instances if is_source(entry)] != sources:
            raise ValueError("sources of instances are followed from the start only")
        discovery.list_anew(entry for entry in new.instances if not is_source(entry))

    def admit(new: Settings) -> None:
        stages.admission.config = _admission(new)

    def set_deadlines(new: Settings) -> None:
        orchestrator.deadlines = _deadlines(new)

    def isolate(new: Settings) -> None:
        orchestrator.isolate_tenants = _isolates_tenants(new)
        health.has_tenants = _has_tenants(new)

    def bound_queue(new: Settings) -> None:
        orchestrator.queue.bound = new.queue_size

    def set_log_level(new: Settings) -> None:
        logging.getLogger().setLevel(new.log_level.upper())

    per_key = ("requests_per_min", "tokens_per_min", "concurrent")
    limits = [f"{whose}_{unit}" for whose in ("key", "all") for unit in per_key]
    reloader.follow((*limits, *KEY_SETTINGS), limit)
    reloader.follow(("isolate_tenants", *KEY_SETTINGS), isolate)
    reloader.follow(("instances",), list_instances)
    reloader.follow(("admission_floor_ms", "default_max_tokens"), admit)
    reloader.follow(("default_deadline_s", "max_deadline_s", "sdk_timeouts"), set_deadlines)
    reloader.follow(("queue_size",), bound_queue)
    reloader.follow(("log_level",), set_log_level)
    # Read whenever they are needed, so there is nothing to apply.
    reloader.follow(("shutdown_grace_s", "interrupt_grace_s"), lambda new: None)


def journal_config(settings: Settings) -> JournalConfig | None:
    """Settings of the journal of durable tasks; None where none is configured."""
    if settings.journal_path is None:
        return None
    key = settings.journal_key
    return JournalConfig(
        settings.journal_path,
        window_ms=settings.journal_window_ms if settings.journal_async else 0.0,
        keep_results_s=settings.journal_keep_results_s,
        keep_s=settings.journal_keep_s,
        keys=() if key is None else read_keys(key.get_secret_value()),
    )


def _batches(settings: Settings, file: JournalFile, clock: Clock) -> Batches:
    """Batches, in a folder beside the journal, under the journal's locks and keys."""
    config = BatchConfig(
        Path(f"{file.config.path}.batches"),
        window=settings.batch_window,
        max_lines=settings.batch_max_lines,
        line_bytes=settings.max_body_bytes,
        file_bytes=settings.batch_file_bytes,
        folder_bytes=settings.batch_folder_bytes,
        keep_s=settings.batch_keep_s,
        attempts=settings.attempts,
    )
    return Batches(config, file.sealer, clock, file.boot)


def _admission(settings: Settings) -> AdmissionConfig:
    return AdmissionConfig(
        floor_ms=settings.admission_floor_ms, default_max_tokens=settings.default_max_tokens
    )


def _feasibility(settings: Settings) -> FeasibilityConfig:
    """Feasibility settings, shared by tasks and slots."""
    return FeasibilityConfig(
        mode=settings.admission,
        refusal_cap=settings.refusal_cap,
        sample=settings.refusal_sample,
    )


def _deadlines(settings: Settings) -> DeadlineConfig:
    return DeadlineConfig(
        default_s=settings.default_deadline_s,
        max_s=settings.max_deadline_s,
        reads_sdk_timeouts=settings.sdk_timeouts,
    )


def keys_of(settings: Settings) -> tuple[Key, ...]:
    """Every key that the settings name."""
    keys = []
    if settings.token is not None:
        keys.append(Key("default", digest_of(settings.token.get_secret_value())))
    if settings.admin_token is not None:
        admin = digest_of(settings.admin_token.get_secret_value())
        keys.append(Key("admin", admin, is_admin=True))
    for name, key in settings.keys.items():
        digest = bytes.fromhex(key.digest_hex)
        keys.append(Key(name, digest, key.names_tenants, is_admin=key.is_admin))
    return tuple(keys)


def _has_tenants(settings: Settings) -> bool:
    return len(keys_of(settings)) > 1


def _isolates_tenants(settings: Settings) -> bool:
    stated = settings.isolate_tenants
    return _has_tenants(settings) if stated is None else stated


def _api(settings: Settings, keys: tuple[Key, ...]) -> ApiConfig:
    return ApiConfig(
        keys,
        BodyConfig(settings.max_body_bytes, settings.all_bodies_bytes, settings.body_timeout_s),
        BrowserConfig(settings.allowed_hosts, settings.cors_origins, settings.cors_credentials),
        ConnectionConfig(
            settings.max_connections, settings.header_timeout_s, settings.idle_timeout_s
        ),
        StreamConfig(
            backlog_bytes=settings.slow_client_buffer_bytes,
            timeout_s=settings.slow_client_timeout_s,
            kernel_bytes=settings.slow_client_kernel_bytes,
            keepalive_s=settings.sse_keepalive_s or None,
            behind_s=settings.slow_client_pause_s,
            metrics_every_s=settings.metrics_event_ms / 1000,
        ),
        ResponseStoreConfig(
            settings.keep_responses, settings.keep_responses_s, settings.keep_responses_bytes
        ),
        FormatConfig(settings.tool_format, settings.reasoning_format),
        GrammarConfig(settings.open_objects, settings.spaced_json),
        settings.strict_fields,
        settings.model_aliases,
        vllm_metrics=settings.vllm_metrics,
        batch_objectives=frozenset(settings.batch_objectives),
    )


def _session_config(settings: Settings) -> SessionConfig:
    return SessionConfig(
        idle_keep_s=settings.session_keep_s,
        max_idle_keep_s=settings.max_session_keep_s,
        ttl_s=settings.session_ttl_s,
        per_key=settings.sessions_per_key,
        session_bytes=settings.session_bytes,
        all_bytes=settings.all_sessions_bytes,
    )


def _rate_limits(settings: Settings, keys: Iterable[Key]) -> RateLimitConfig:
    """The rate limits of each key; limits that a key states itself override those for every key."""
    default = Limits(
        settings.key_requests_per_min, settings.key_tokens_per_min, settings.key_concurrent
    )
    by_key = {}
    for key in keys:
        own = settings.keys.get(key.tenant)
        if own is not None:
            by_key[key.fingerprint] = Limits(
                _first(own.requests_per_min, default.requests_per_min),
                _first(own.tokens_per_min, default.tokens_per_min),
                _first(own.concurrent, default.concurrent),
            )
    everyone = Limits(
        settings.all_requests_per_min, settings.all_tokens_per_min, settings.all_concurrent
    )
    return RateLimitConfig(everyone, default, by_key)


def _first(own: int | None, otherwise: int) -> int:
    return otherwise if own is None else own
