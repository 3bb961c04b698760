"""Reads an orchestrator's counters from its Prometheus endpoint."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from perf.load.connection import HOST, HttpConnection

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one scrape, by name and labels."""

    samples: Mapping[Key, float]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have ``labels``; 0 where there is none."""
        wanted = labels.items()
        return sum(
            value
            for (found, own), value in self.samples.items()
            if found == name and wanted <= dict(own).items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's samples by one of their labels."""
        return {
            dict(own)[label]: value for (one, own), value in self.samples.items() if one == name
        }

    @classmethod
    def between(cls, before: Self, after: Self) -> Self:
        """Counts from ``before`` to ``after``; gauges mean nothing in the result."""
        return cls({k: value - before.samples.get(k, 0.0) for k, value in after.samples.items()})

    @classmethod
    def sum_of(cls, counts: Sequence[Self]) -> Self:
        """Counts of several stretches together."""
        total: dict[Key, float] = {}
        for each in counts:
            for key, value in each.samples.items():
                total[key] = total.get(key, 0.0) + value
        return cls(total)

    def quantile(self, name: str, q: float) -> float:
        """The ``q``-quantile (0 to 1) of a histogram, interpolated within its bucket as Prometheus
        does. Raises ``ValueError`` when nothing was counted."""
        edges: dict[float, float] = {}
        for (found, labels), count in self.samples.items():
            if found == f"{name}_bucket":
                edge = float(dict(labels)["le"])
                edges[edge] = edges.get(edge, 0.0) + count
        total = edges.get(math.inf, 0.0)
        if not total:
            raise ValueError(f"{name} has counted nothing")
        below_edge, below = 0.0, 0.0
        for edge, count in sorted(edges.items()):
            if count >= q * total:
                if math.isinf(edge):
                    break
                return below_edge + (edge - below_edge) * (q * total - below) / (count - below)
            below_edge, below = edge, count
        return below_edge

    def unbalanced(self) -> list[str]:
        """Complaints about counts that must balance once a service has nothing left to do."""
        offered, recovered, ended = (
            self.total(f"tidegate_{name}_total") for name in ("offered", "recovered", "outcomes")
        )
        ended += self.total("tidegate_journal_lost_total", stage="live")  # another has their end
        wrong = []
        if offered + recovered != ended:
            wrong.append(f"{offered:g} offered and {recovered:g} recovered, {ended:g} ended")
        for kind in ("running", "waiting"):
            if jobs := self.total("tidegate_worker_jobs", kind=kind):
                wrong.append(f"{jobs:g} jobs {kind} on workers")
        if blocks := self.total("tidegate_kv_blocks", kind="used"):
            wrong.append(f"{blocks:g} KV blocks are still used")
        return wrong

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and no worker has anything to do."""
        return not self.total("tidegate_queue_depth") and not self.total("tidegate_worker_jobs")


async def until_running(port: int, count: int) -> None:
    """Wait until workers run at least ``count`` jobs of the service at ``port`` of this machine."""
    while True:
        counts = await scrape(HOST, port)
        if counts.total("tidegate_worker_jobs", kind="running") >= count:
            return
        await asyncio.sleep(0.05)


async def scrape(host: str, port: int) -> Scrape:
    """Read everything that ``/metrics`` says now."""
    async with HttpConnection(host, port) as http:
        http.send("GET", "/metrics")
        _, body = await http.answer()
    text = body.decode()
    families = await asyncio.to_thread(lambda: list(text_string_to_metric_families(text)))
    return Scrape(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
    )
