"""What is measured, all of it registered at start, in a registry of our own.

Nothing here is paid per token: lanes and tasks count in plain integers, which are collected when
somebody scrapes (LB-8). Names end in their unit.
"""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.instances.instance import InstanceState
from orchestrator.instances.registry import Registry
from orchestrator.placement import Placer
from orchestrator.prediction.calibration import Calibration
from orchestrator.prediction.feasibility import RefusalKind, RefusalStats
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.task import Task
from worker.protocol import Outcome, WorkerStats

_MS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 3e4, 1e5, 3e5)
_US = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3)


_WORKER_TOTALS: Final[tuple[tuple[str, str, Callable[[WorkerStats], float]], ...]] = (
    (
        "prompt_tokens_computed",
        "Prompt tokens that workers computed",
        lambda stats: stats.prefill_tokens_total,
    ),
    (
        "prompt_tokens_cached",
        "Prompt tokens found in the prefix cache (WK-5)",
        lambda stats: stats.cached_tokens_total,
    ),
    ("prefix_blocks_hit", "Of prompts' blocks, those cached", lambda stats: stats.hit_blocks_total),
    ("prefix_blocks_missed", "And those not", lambda stats: stats.missed_blocks_total),
    ("prefix_blocks_evicted", "For others' sake", lambda stats: stats.evicted_blocks_total),
    ("kv_disk_blocks_saved", "Blocks to disk", lambda stats: stats.disk_saved_blocks_total),
    ("kv_disk_blocks_loaded", "Blocks from disk", lambda stats: stats.disk_loaded_blocks_total),
    ("kv_disk_blocks_skipped", "Evicted unsaved", lambda stats: stats.disk_skipped_blocks_total),
    ("kv_disk_save_ms", "Time spent saving", lambda stats: stats.disk_save_ms_total),
    ("kv_disk_load_ms", "Time spent loading", lambda stats: stats.disk_load_ms_total),
    (
        "kv_disk_failures",
        "Block files that could not be written or used",
        lambda stats: stats.disk_failures_total,
    ),
)
"""Counted by each worker since it began: name, text, where it is."""


class Metrics:
    """Every metric of one orchestrator."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.offered = self._counter("offered", "Requests offered", "api")
        self.outcomes = self._counter(
            "outcomes", "What offered requests came to (DL-10)", "api", "model", "outcome", "code"
        )
        self.missed_parts = self._counter(
            "missed_parts", "Requests missed, by what of them was late (DL-14)", "part"
        )
        for part in Part:
            self.missed_parts.labels(part)
        self.http_errors = self._counter("http_errors", "Error responses", "status", "code")
        self.admission_ms = self._histogram("admission_ms", "From arrival to the queue", _MS)
        self.queue_ms = self._histogram("queue_ms", "From the queue to a lane", _MS)
        self.dispatch_ms = self._histogram(
            "dispatch_ms", "From a lane to the start of generation", _MS
        )
        self.ttft_ms = self._histogram("ttft_ms", "From arrival to the first token", _MS)
        self.total_ms = self._histogram("total_ms", "From arrival to the end", _MS)
        self.emission_us = self._histogram(
            "per_token_emission_latency_us",
            "From a frame's decoding to its tokens being written, per token (sampled)",
            _US,
        )
        self.cancellation_ms = self._histogram(
            "cancellation_detection_latency_ms",
            "From a cancel to the worker's word that slot and blocks are free",
            _MS,
        )
        self.disconnect_ms = self._histogram(
            "client_disconnect_detection_ms",
            "From a client's disconnect, seen, to the worker's word that its slot is free",
            _MS,
        )
        self.abort_freed_ms = Histogram(
            "tidegate_abort_to_freed_ms",
            "On the worker: from its notice of an abort or deadline to slot and blocks free (WP-5)",
            ("cause",),
            registry=self.registry,
            buckets=_MS,
        )
        self.shutdown_ms = Gauge(
            "tidegate_graceful_shutdown_duration_ms",
            "How long the last drain took",
            registry=self.registry,
        )
        self.settled = dict.fromkeys(Outcome, 0)
        """How many requests came to each outcome (DL-10)."""
        self.calibration = Calibration()
        self.tokens_generated = 0
        self.tokens_wasted = 0
        self.tokens_late = 0

    @property
    def attainment(self) -> float:
        """Requests whose deadline was kept, of all that have ended (DL-10); 1 before any has."""
        ended = sum(self.settled.values())
        return self.settled[Outcome.MET] / ended if ended else 1.0

    @property
    def waste(self) -> float:
        """Tokens for requests that ended neither met nor partial, of all tokens (DL-10)."""
        return self.tokens_wasted / self.tokens_generated if self.tokens_generated else 0.0

    def watch(
        self, registry: Registry, queue: TaskQueue[Task], refusals: RefusalStats, placer: Placer
    ) -> None:
        """Collect the state of instances, queue, admission and placement at every scrape."""
        self.registry.register(_StateCollector(self, registry, queue, refusals, placer))

    def count_late(self, tokens: int) -> None:
        """Tokens that came after their task had ended: waste, and counted apart."""
        self.tokens_generated += tokens
        self.tokens_wasted += tokens
        self.tokens_late += tokens

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tidegate_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tidegate_{name}", text, registry=self.registry, buckets=buckets)


class _StateCollector(Collector):
    """Reads what others count anyway, when asked."""

    def __init__(
        self,
        metrics: Metrics,
        registry: Registry,
        queue: TaskQueue[Task],
        refusals: RefusalStats,
        placer: Placer,
    ) -> None:
        self._placer = placer
        self._refusals = refusals
        self._metrics = metrics
        self._registry = registry
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("tidegate_queue_depth", "Tasks that wait", len(self._queue))
        yield GaugeMetricFamily(
            "tidegate_snapshot_version",
            "Moves with topology and capability of the instances",
            self._registry.snapshot_version,
        )
        for name, text, value in (
            ("tokens_generated", "Tokens received from workers", self._metrics.tokens_generated),
            ("tokens_wasted", "Of these, for requests not met", self._metrics.tokens_wasted),
            ("tokens_late", "Generated after a deadline or abort", self._metrics.tokens_late),
        ):
            yield CounterMetricFamily(f"tidegate_{name}", text, value)
        yield from self._deadlines()
        yield from self._placement()
        yield from self._lanes()
        yield from self._instances()

    def _deadlines(self) -> Iterable[Metric]:
        refusals, metrics = self._refusals, self._metrics
        yield GaugeMetricFamily(
            "tidegate_queue_background",
            "Waiting tasks that have next to no chance of being in time",
            self._queue.background,
        )
        yield GaugeMetricFamily(
            "tidegate_queue_work_ms",
            "Engine time that all waiting tasks will probably take",
            self._queue.work_ms,
        )
        yield GaugeMetricFamily(
            "tidegate_attainment", "Requests met, of all that ended (DL-10)", metrics.attainment
        )
        yield GaugeMetricFamily(
            "tidegate_waste", "Tokens for requests not met, of all tokens (DL-10)", metrics.waste
        )
        yield CounterMetricFamily(
            "tidegate_infeasible_judged", "Offers certain to miss (DL-7)", refusals.infeasible
        )
        yield CounterMetricFamily(
            "tidegate_infeasible_refused", "Of these, refused", refusals.refused
        )
        unserved = CounterMetricFamily(
            "tidegate_unserved", "Requests ended by our own decision (DL-17)", labels=["kind"]
        )
        samples = CounterMetricFamily(
            "tidegate_infeasible_samples",
            "Such decisions that were not carried out: what the requests came to (DL-17)",
            labels=["kind", "result"],
        )
        for kind in RefusalKind:
            unserved.add_metric([kind], refusals.unserved[kind])
            for result, met in (("met", True), ("lost", False)):
                samples.add_metric([kind, result], refusals.sampled[kind, met])
        yield unserved
        yield samples
        given = CounterMetricFamily(
            "tidegate_on_time_chance",
            "Requests by the chance of being in time that they had when they were sent",
            labels=["class", "bin"],
        )
        met_of = CounterMetricFamily(
            "tidegate_on_time_met", "Of these, met", labels=["class", "bin"]
        )
        for (priority, percent), tally in metrics.calibration.tallies.items():
            given.add_metric([priority, str(percent)], tally.given)
            met_of.add_metric([priority, str(percent)], tally.met)
        yield given
        yield met_of
        yield GaugeMetricFamily(
            "tidegate_false_refusal_rate",
            "Share of those let in and met",
            refusals.false_rate,
        )

    def _placement(self) -> Iterable[Metric]:
        placer = self._placer
        yield CounterMetricFamily("tidegate_placements", "Tasks placed", placer.choices)
        yield CounterMetricFamily(
            "tidegate_placements_by_prefix",
            "Of these, where some of the prompt was cached (OR-9)",
            placer.prefix_choices,
        )
        yield CounterMetricFamily(
            "tidegate_placements_by_session",
            "And where the conversation was (OR-9)",
            placer.home_choices,
        )
        if placer.policy is not None:
            falls = CounterMetricFamily(
                "tidegate_placement_policy_fallbacks",
                "Choices that the operator's policy could not make (OR-8)",
                labels=["reason"],
            )
            for reason, count in placer.policy.fallbacks.items():
                falls.add_metric([reason], count)
            yield falls

    def _lanes(self) -> Iterable[Metric]:
        lanes = [lane for instance in self._registry for lane in instance.lanes]
        submitted = sum(lane.submitted_total for lane in lanes)
        sessions = sum(lane.sessions_total for lane in lanes)
        yield CounterMetricFamily(
            "tidegate_lane_frames", "Frames received", sum(lane.frames_total for lane in lanes)
        )
        yield CounterMetricFamily("tidegate_lane_sessions", "Lanes opened", sessions)
        yield GaugeMetricFamily(
            "tidegate_worker_connection_reuse_rate",
            "Share of jobs that needed no new connection (LB-5)",
            1.0 - min(1.0, sessions / submitted) if submitted else 1.0,
        )

    def _instances(self) -> Iterable[Metric]:
        state = _family("instance_state", "1 for the state that an instance is in", "state")
        blocks = _family(
            "kv_blocks", "KV blocks; used + free = total, and cached ones are free", "kind"
        )
        jobs = _family("worker_jobs", "Jobs on the worker, ours and others'", "kind")
        load = _family("instance_load", "Our jobs on the instance")
        window = _family("instance_window", "Jobs to have there at most, as learnt")
        prefixes = _family("instance_prefix_blocks", "Cached blocks that placement knows of")
        step = _family("step_ms", "Moving average of a decoding step")
        check = _family("deadline_check_duration_us", "Per request and step, sampled (DL-13)")
        busy = _family("cuda_stream_utilization", "Share of the time the GPU is at a step (LB-7)")
        made = CounterMetricFamily(
            "tidegate_worker_tokens", "Tokens generated since the worker began", labels=["instance"]
        )
        jobs_made = CounterMetricFamily(
            "tidegate_worker_jobs_received",
            "Jobs handed in since the worker began",
            labels=["instance"],
        )
        totals = [
            (CounterMetricFamily(f"tidegate_{name}", text, labels=["instance"]), read)
            for name, text, read in _WORKER_TOTALS
        ]
        for instance in self._registry:
            name = instance.address
            for possible in InstanceState:
                state.add_metric([name, possible.value], float(possible is instance.state))
            load.add_metric([name], sum(lane.load for lane in instance.lanes))
            window.add_metric([name], instance.concurrency.limit)
            prefixes.add_metric([name], self._registry.prefixes.count(name))
            stats = instance.stats
            if stats is None:
                continue
            blocks.add_metric([name, "used"], stats.kv_blocks_used)
            blocks.add_metric([name, "free"], stats.kv_blocks_free)
            blocks.add_metric([name, "total"], stats.kv_blocks_total)
            blocks.add_metric([name, "cached"], stats.kv_blocks_cached)
            for family, read in totals:
                family.add_metric([name], read(stats))
            jobs.add_metric([name, "running"], stats.running)
            jobs.add_metric([name, "waiting"], stats.waiting)
            step.add_metric([name], stats.step_ms)
            check.add_metric([name], stats.check_us)
            busy.add_metric([name], stats.stream_utilization)
            made.add_metric([name], stats.tokens_total)
            jobs_made.add_metric([name], stats.jobs_total)
        return [
            state,
            blocks,
            jobs,
            load,
            window,
            prefixes,
            step,
            check,
            busy,
            made,
            jobs_made,
            *(f for f, _ in totals),
        ]


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tidegate_{name}", text, labels=["instance", *labels])
