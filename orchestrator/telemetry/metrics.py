"""Declares, counts and reads metrics. The packages' ``metrics.py`` and docs/metrics.md list them.

Metrics cost nothing per token: lanes and tasks count in plain integers, which each scrape reads
(LB-8). Names end in the unit.
"""

import asyncio
import resource
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.telemetry.trace_context import TraceContext

S = TypeVar("S")
C = TypeVar("C", bound=Collector)

PREFIX = "tidegate_"
MS_BUCKETS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 3e4, 1e5, 3e5)
US_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3)

TENANT = "tenant"
"""A label that only operators see, because tenants' names are private."""
SLICE_S = 0.001
"""Seconds of encoding after which the event loop runs other work. When it did so after each of 100
parts, a scrape of a busy loop took 1.1 s with twelve other busy processes."""
_EOF = b"# EOF\n"
"""The last line of a page in the OpenMetrics format."""

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Label values in the order of the labels, each with the sample's value."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric for the documentation."""

    type: Literal["counter", "gauge", "histogram"]
    name: str
    """The scraped name, without the ``_total`` of a counter."""
    unit: str
    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MetricRow(Generic[S]):
    """A metric that is read from ``S`` at every scrape."""

    type: Literal["counter", "gauge"]
    name: str
    unit: str
    text: str
    read: Callable[[S], float | Samples]
    """Reads the value if there are no labels, otherwise samples."""
    labels: tuple[str, ...] = ()


class Kept(NamedTuple):
    """The items that one holder currently keeps in memory."""

    items: int
    bytes: int


class Metrics:
    """All metrics of one orchestrator, in their own registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.declared: list[Declared] = []
        self._encoding = asyncio.Lock()
        self._collectors: list[tuple[Collector, bool, str]] = []
        """Collectors. Each has a flag for tenant labels and the prefix of its metrics' names."""
        self.holders: dict[str, Callable[[], Kept]] = {}

    def keeps(self, holder: str, read: Callable[[], Kept]) -> None:
        """Export the items that ``holder`` keeps, from ``read``. Memory that grows to its bound
        looks like a leak unless its holder is known."""
        self.holders[holder] = read

    def counter(self, name: str, unit: str, text: str, *labels: str) -> Counter:
        self.declared.append(Declared("counter", PREFIX + name, unit, text, labels))
        return self._added(Counter(PREFIX + name, text, labels, registry=self.registry), labels)

    def histogram(self, name: str, text: str, *labels: str) -> Histogram:
        """Add a histogram of milliseconds, or of microseconds if ``name`` ends in ``_us``."""
        if name.endswith("_us"):
            return self._histogram(PREFIX + name, "µs", text, US_BUCKETS, labels)
        return self._histogram(PREFIX + name, "ms", text, MS_BUCKETS, labels)

    def standard_histogram(
        self, name: str, text: str, buckets: Sequence[float], *labels: str
    ) -> Histogram:
        """Add a histogram of seconds with the name and buckets of an external convention."""
        return self._histogram(name, "s", text, buckets, labels)

    def _histogram(
        self, name: str, unit: str, text: str, buckets: Sequence[float], labels: tuple[str, ...]
    ) -> Histogram:
        self.declared.append(Declared("histogram", name, unit, text, labels))
        made = Histogram(name, text, labels, registry=self.registry, buckets=buckets)
        return self._added(made, labels)

    def watch(self, source: S, rows: Sequence[MetricRow[S]], prefix: str = PREFIX) -> None:
        """Read ``rows`` from ``source`` at every scrape. Their names begin with ``prefix``."""
        for row in rows:
            self.declared.append(
                Declared(row.type, prefix + row.name, row.unit, row.text, row.labels)
            )
        for labels in ((), (TENANT,)):  # apart, so that the others are for everybody
            if own := [row for row in rows if (TENANT in row.labels) == bool(labels)]:
                self.registry.register(self._added(_Watch(source, own, prefix), labels, prefix))

    async def exposition(
        self, accept: str = "", *, tenants: bool = True, prefix: str = ""
    ) -> tuple[bytes, str]:
        """The page for Prometheus and its content type: OpenMetrics, which has exemplars, if
        ``accept`` asks for it. Without ``tenants`` the page has no metrics that name tenants. With
        ``prefix`` it has only the metrics that were added with that prefix. Encoding takes some ms:
        in slices, with other work in between, and one scrape at a time."""
        encode, content_type = choose_encoder(accept)
        parts = []
        async with self._encoding:
            began = time.perf_counter()
            for collector, names_tenants, begins in self._collectors:
                if (names_tenants and not tenants) or (prefix and begins != prefix):
                    continue
                parts.append(encode(collector).removesuffix(_EOF))
                if time.perf_counter() - began > SLICE_S:
                    await asyncio.sleep(0)
                    began = time.perf_counter()
        if content_type.startswith("application/openmetrics-text"):
            parts.append(_EOF)
        return b"".join(parts), content_type

    def _added(self, collector: C, labels: Iterable[str], prefix: str = PREFIX) -> C:
        self._collectors.append((collector, TENANT in labels, prefix))
        return collector


def exemplar_of(trace: TraceContext | None) -> dict[str, str] | None:
    """Labels that link a histogram's bucket to a request's trace; None if the trace is not kept."""
    return {"trace_id": trace.trace_id} if trace is not None and trace.sampled else None


class _Watch(Collector, Generic[S]):
    def __init__(self, source: S, rows: Sequence[MetricRow[S]], prefix: str) -> None:
        self._source = source
        self._rows = rows
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        for row in self._rows:
            family = CounterMetricFamily if row.type == "counter" else GaugeMetricFamily
            metric = family(self._prefix + row.name, row.text, labels=row.labels)
            read = row.read(self._source)
            for labels, value in [((), read)] if isinstance(read, float | int) else read:
                metric.add_metric(labels, value)
            yield metric


KEPT: tuple[MetricRow[Mapping[str, Callable[[], Kept]]], ...] = (
    MetricRow(
        "gauge",
        "resident_peak_bytes",
        "bytes",
        "Peak memory of the process",
        lambda _: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    ),
    MetricRow(
        "gauge",
        "kept_items",
        "items",
        "Kept items of earlier requests, by holder; each has a bound",
        lambda holders: [((name,), read().items) for name, read in holders.items()],
        ("holder",),
    ),
    MetricRow(
        "gauge",
        "kept_bytes",
        "bytes",
        "Approximate memory of kept items, by holder",
        lambda holders: [((name,), read().bytes) for name, read in holders.items()],
        ("holder",),
    ),
)


OTHER = "other"
MAX_TENANTS = 20
MAX_MODELS = 50
"""Limits for tenants and models: each value is a time series, or one per bucket of a histogram."""


class BoundedValues:
    """Keeps the first ``most`` values unchanged. All later values become ``other``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[Hashable] = set()

    def of(self, value: str) -> str:
        """The label value for ``value``: itself or ``other``."""
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value
