"""An orchestrator's own counts, read where Prometheus would."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from perf.http import HttpConnection

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Every sample by name and labels."""

    samples: Mapping[Key, float]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have ``labels``; 0 where there is none."""
        wanted = labels.items()
        return sum(
            value
            for (found, own), value in self.samples.items()
            if found == name and wanted <= dict(own).items()
        )

    @classmethod
    def between(cls, before: Self, after: Self) -> Self:
        """What was counted in between; gauges mean nothing in it."""
        return cls({k: value - before.samples.get(k, 0.0) for k, value in after.samples.items()})

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and no worker has anything to do."""
        return not self.total("tidegate_queue_depth") and not self.total("tidegate_worker_jobs")

    @property
    def false_refusals(self) -> float | None:
        """Share of the admitted would-be refusals that were met; None where none was admitted."""
        return None


async def scrape(host: str, port: int) -> Scrape:
    """Everything that ``/metrics`` says now."""
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
