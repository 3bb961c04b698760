"""Bundles written by benchmark runs (PF-6): figures, machine, command, versions, digests."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec

from perf.report.stats import bootstrap, median, percentile

SCHEMA_VERSION = 1
_BOOTSTRAP_SEED = 7

Better = Literal["higher", "lower", "neither"]
Spread = Literal["min–max", "p25–p75", "p5–p95", "bootstrap 95 %"]
"""Kinds of interval from ``low`` to ``high``. The last is for a figure that is a percentile."""

Tier = Literal["laptop", "workstation", "server with GPU", "CI"]
"""Kinds of machine (PF-8): figures are compared within one tier only."""

_EDGES = {"min–max": (0, 100), "p25–p75": (25, 75), "p5–p95": (5, 95)}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value with its spread over ``n`` samples, in ``unit``.

    ``tolerance`` makes the figure a gate: it fails when worse than the recorded one by more than
    this factor. Only ratios of two figures from one run are stable enough on shared machines.
    """

    key: str
    label: str
    unit: str
    median: float
    low: float
    high: float
    spread: Spread
    n: int
    better: Better = "lower"
    tolerance: float | None = None

    @classmethod
    def of(
        cls,
        key: str,
        label: str,
        unit: str,
        samples: list[float],
        *,
        spread: Literal["min–max", "p25–p75", "p5–p95"] = "min–max",
        better: Better = "lower",
        tolerance: float | None = None,
    ) -> Self:
        """Figure with the median of samples. Raises ``ValueError`` when there are none."""
        low, high = _EDGES[spread]
        return cls(
            key=key,
            label=label,
            unit=unit,
            median=median(samples),
            low=percentile(samples, low),
            high=percentile(samples, high),
            spread=spread,
            n=len(samples),
            better=better,
            tolerance=tolerance,
        )

    @classmethod
    def tail_of(
        cls,
        key: str,
        label: str,
        unit: str,
        samples: list[float],
        q: float,
    ) -> Self:
        """Figure, better if lower, with the ``q``-th percentile of samples, its spread a bootstrap
        interval."""

        def statistic(values: Sequence[float]) -> float:
            return percentile(values, q)

        return cls.resampled(key, label, unit, samples, statistic)

    @classmethod
    def resampled(
        cls,
        key: str,
        label: str,
        unit: str,
        samples: Sequence[float],
        statistic: Callable[[Sequence[float]], float],
        *,
        better: Better = "lower",
        seed: int = _BOOTSTRAP_SEED,
    ) -> Self:
        """Figure with a ``statistic`` of samples, its spread a bootstrap interval."""
        low, high = bootstrap(samples, statistic, random.Random(seed))
        return cls(
            key=key,
            label=label,
            unit=unit,
            median=statistic(samples),
            low=low,
            high=high,
            spread="bootstrap 95 %",
            n=len(samples),
            better=better,
        )


class BenchResult(msgspec.Struct, frozen=True):
    """Findings of one benchmark, or in one sentence why it found nothing."""

    name: str
    what: str
    seconds: float
    figures: list[Figure] = []
    skipped: str = ""
    failed: str = ""


class MachineFacts(msgspec.Struct, frozen=True):
    """Machine that a run ran on."""

    cpu: str
    cores: int
    memory_gib: float
    gpus: list[str]
    kernel: str
    load_before: float
    """One-minute load average when the run began: what else the machine was doing."""
    stolen_percent: float | None = None
    """Share of the processor time wanted during the run that the host gave to others; None where it
    is not known."""
    tier: Tier | None = None
    """Kind of machine; None in bundles that are older than this field."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Bundle of a whole run. ``dirty``: the checkout had changes that ``commit`` does not have."""

    schema: int = SCHEMA_VERSION
    created: str
    command: str
    seed: int | None = None
    """First seed of what was drawn; None where nothing was, and in older bundles."""
    commit: str
    dirty: bool = False
    quick: bool
    machine: MachineFacts
    versions: dict[str, str]
    engine: str
    engine_digest: str
    model: str
    model_digest: str
    results: list[BenchResult]

    def figures(self) -> dict[str, Figure]:
        """All figures by key."""
        return {figure.key: figure for result in self.results for figure in result.figures}


def save(bundle: object, path: Path) -> None:
    """Write ``bundle`` as indented JSON; ``recording.Recording.save`` is for runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(bundle), indent=1) + b"\n")


def read(path: Path) -> Bundle:
    """Load a bundle. Raises ``ValueError`` for another schema or a broken file."""
    try:
        bundle = msgspec.json.decode(path.read_bytes(), type=Bundle)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a benchmark bundle: {error}") from error
    if bundle.schema != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema {bundle.schema}, expected {SCHEMA_VERSION}")
    return bundle
