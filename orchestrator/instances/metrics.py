"""Metrics of instances: states, breakers, lanes, and the workers' heartbeat statistics."""

from collections.abc import Callable, Iterator

from orchestrator.instances.breaker import BreakerState
from orchestrator.instances.instance import Instance, InstanceState
from orchestrator.instances.registry import Registry
from orchestrator.lanes import Lane
from orchestrator.telemetry.metrics import MetricRow, Samples
from protocol import WorkerStats

_Read = Callable[[Registry], Samples]


def _each(read: Callable[[Instance], float]) -> _Read:
    return lambda registry: (((instance.address,), read(instance)) for instance in registry)


def _serving(read: Callable[[Instance], float]) -> _Read:
    """Read a metric from each instance that serves text. Others, such as those for clips, do not
    count for scaling."""
    return lambda registry: (
        ((instance.address,), read(instance)) for instance in registry if instance.card is not None
    )


def _reported(read: Callable[[WorkerStats], float]) -> _Read:
    """Read a metric from the statistics of each instance that has reported."""
    return lambda registry: (
        ((instance.address,), read(instance.stats))
        for instance in registry
        if instance.stats is not None
    )


def _kinds(**reads: Callable[[WorkerStats], float]) -> _Read:
    return lambda registry: (
        ((instance.address, kind), read(instance.stats))
        for instance in registry
        if instance.stats is not None
        for kind, read in reads.items()
    )


def _states(registry: Registry) -> Iterator[tuple[tuple[str, ...], float]]:
    for instance in registry:
        now = instance.describe_state()["state"]
        for state in {*InstanceState, instance.other_work} - {""}:
            yield (instance.address, str(state)), float(state == now)


def _breaker_states(registry: Registry) -> Iterator[tuple[tuple[str, ...], float]]:
    for instance in registry:
        now = registry.breakers.state(instance.address)
        for state in BreakerState:
            yield (instance.address, state.value), float(state is now)


def _lanes(registry: Registry) -> Iterator[Lane]:
    return (lane for instance in registry for lane in instance.lanes)


def _utilization(registry: Registry) -> float:
    up = [instance for instance in registry if instance.state is InstanceState.UP]
    slots = sum(instance.concurrency.slots for instance in up)
    taken = sum(min(instance.load, instance.concurrency.slots) for instance in up)
    return taken / slots if slots else 0.0


def _reuse_rate(registry: Registry) -> float:
    submitted = sum(lane.submitted_total for lane in _lanes(registry))
    sessions = sum(lane.sessions_total for lane in _lanes(registry))
    return 1.0 - min(1.0, sessions / submitted) if submitted else 1.0


INSTANCES: tuple[MetricRow[Registry], ...] = (
    MetricRow(
        "gauge",
        "snapshot_version",
        "version",
        "Changes with the topology and capabilities of the instances",
        lambda registry: registry.snapshot_version,
    ),
    MetricRow(
        "gauge",
        "instance_state",
        "0 or 1",
        "1 for the state that an instance is in",
        _states,
        ("instance", "state"),
    ),
    MetricRow(
        "gauge",
        "instance_load",
        "jobs",
        "Our jobs on the instance",
        _each(lambda instance: instance.lane_load),
        ("instance",),
    ),
    MetricRow(
        "gauge",
        "instance_slots",
        "jobs",
        "Jobs that can run there at once (OR-6)",
        _serving(lambda instance: instance.concurrency.fitting),
        ("instance",),
    ),
    MetricRow(
        "gauge",
        "instance_rows",
        "jobs",
        "Jobs that should run there at once, so that the most are in time",
        _serving(lambda instance: instance.concurrency.slots),
        ("instance",),
    ),
    MetricRow(
        "gauge",
        "utilization",
        "share",
        "Share of slots taken, by us or others, of all instances that are up; 0 if none is up",
        _utilization,
    ),
    MetricRow(
        "counter",
        "instance_health_failures",
        "times",
        "How often it stopped being up or was unreachable (PF-4)",
        _each(lambda instance: instance.health_failures),
        ("instance",),
    ),
    MetricRow(
        "gauge",
        "instance_prefix_blocks",
        "blocks",
        "Cached blocks that placement knows",
        lambda registry: (((i.address,), registry.prefixes.count(i.address)) for i in registry),
        ("instance",),
    ),
    MetricRow(
        "gauge",
        "breaker_state",
        "0 or 1",
        "1 for the state that an instance's circuit breaker is in",
        _breaker_states,
        ("instance", "state"),
    ),
    MetricRow(
        "counter",
        "ejections",
        "times",
        "How often an instance's circuit breaker opened (DL-11)",
        lambda registry: (((i.address,), registry.breakers.ejections[i.address]) for i in registry),
        ("instance",),
    ),
    MetricRow(
        "counter",
        "lane_frames",
        "frames",
        "Frames received",
        lambda registry: sum(lane.frames_total for lane in _lanes(registry)),
    ),
    MetricRow(
        "gauge",
        "worker_connection_reuse_rate",
        "share",
        "Share of jobs that needed no new connection (LB-5)",
        _reuse_rate,
    ),
)

REPORTED: tuple[MetricRow[Registry], ...] = (
    MetricRow(
        "gauge",
        "model_load_duration_ms",
        "ms",
        "How long the instance's model took to load (LB-6)",
        lambda registry: (
            ((instance.address, instance.card.model), instance.stats.load_ms)
            for instance in registry
            if instance.card is not None and instance.stats is not None
        ),
        ("instance", "model"),
    ),
    MetricRow(
        "gauge",
        "kv_blocks",
        "blocks",
        "KV blocks; used + free = total, cached ones are free, and those kept for sessions cached",
        _kinds(
            used=lambda stats: stats.kv_blocks_used,
            free=lambda stats: stats.kv_blocks_free,
            total=lambda stats: stats.kv_blocks_total,
            cached=lambda stats: stats.kv_blocks_cached,
            session=lambda stats: stats.session_blocks,
        ),
        ("instance", "kind"),
    ),
    MetricRow(
        "gauge",
        "worker_jobs",
        "jobs",
        "Jobs on the worker, ours and others'",
        _kinds(running=lambda stats: stats.running, waiting=lambda stats: stats.waiting),
        ("instance", "kind"),
    ),
    *(
        MetricRow("gauge", name, unit, text, _reported(read), ("instance",))
        for name, unit, text, read in (
            ("step_ms", "ms", "Moving average of a decoding step", lambda of: of.step_ms),
            (
                "sessions_kept",
                "sessions",
                "Conversations with KV kept for their next turn (WK-9)",
                lambda of: of.sessions,
            ),
            (
                "cuda_init_duration_ms",
                "ms",
                "How long CUDA took to begin, 0 without (LB-6)",
                lambda of: of.cuda_init_ms,
            ),
            (
                "deadline_check_duration_us",
                "µs",
                "Deadline and abort check, per request and step, sampled (DL-13)",
                lambda of: of.check_us,
            ),
            (
                "cuda_stream_utilization",
                "share",
                "Share of the time that the GPU is at a step (LB-7)",
                lambda of: of.stream_utilization,
            ),
        )
    ),
)
"""Metrics from the workers' last heartbeats."""

_Total = tuple[str, str, str, Callable[[WorkerStats], float]]
_TOTALS: tuple[_Total, ...] = (
    ("worker_tokens", "tokens", "Tokens generated", lambda of: of.tokens_total),
    (
        "prompt_tokens_computed",
        "tokens",
        "Prompt tokens that the worker computed",
        lambda of: of.prefill_tokens_total,
    ),
    (
        "prompt_tokens_cached",
        "tokens",
        "Prompt tokens found in the prefix cache (WK-5)",
        lambda of: of.cached_tokens_total,
    ),
    (
        "prefix_blocks_hit",
        "blocks",
        "Blocks of prompts found in the prefix cache",
        lambda of: of.hit_blocks_total,
    ),
    (
        "prefix_blocks_missed",
        "blocks",
        "Blocks of prompts not found in the prefix cache",
        lambda of: of.missed_blocks_total,
    ),
    (
        "not_finite",
        "jobs",
        "Jobs that ended because the model's numbers were NaN or infinite",
        lambda of: of.not_finite_total,
    ),
    (
        "kv_disk_blocks_saved",
        "blocks",
        "Blocks written to disk",
        lambda of: of.disk_saved_blocks_total,
    ),
    (
        "kv_disk_blocks_loaded",
        "blocks",
        "Blocks read from disk",
        lambda of: of.disk_loaded_blocks_total,
    ),
    ("kv_disk_save_ms", "ms", "Time spent saving to disk", lambda of: of.disk_save_ms_total),
    ("kv_disk_load_ms", "ms", "Time spent loading from disk", lambda of: of.disk_load_ms_total),
    (
        "kv_disk_failures",
        "files",
        "Block files that could not be written or used",
        lambda of: of.disk_failures_total,
    ),
)
TOTALS: tuple[MetricRow[Registry], ...] = tuple(
    MetricRow("counter", name, unit, text, _reported(read), ("instance",))
    for name, unit, text, read in _TOTALS
)
