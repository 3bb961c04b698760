"""``tidegate bench``: the report on all requests together."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from tidegate.cli.terminal import count, duration, share, table

if TYPE_CHECKING:
    from tidegate.cli.load import Plan, Sample


class Spread(msgspec.Struct, frozen=True):
    """Quantiles by the nearest rank; None without samples."""

    p50: float | None
    p90: float | None
    p99: float | None
    most: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ranked = sorted(values)

        def at(part: float) -> float | None:
            if not ranked:
                return None
            return round(ranked[max(0, min(len(ranked), round(part * len(ranked) + 0.5)) - 1)], 3)

        return cls(at(0.5), at(0.9), at(0.99), at(1.0))


class Report(msgspec.Struct, frozen=True):
    """Outcome of a load. Times are milliseconds, rates per second. ``attainment``: share of all
    requests sent that were met.

    ``goodput`` is requests met per second. ``token_gap_ms`` is each answer's mean.
    """

    url: str
    model: str | None
    when: str
    loop: str
    concurrency: int | None
    rate: float | None
    max_tokens: int
    deadline_ms: int
    first_token_ms: int | None
    seed: int
    requests: int
    seconds: float
    outcomes: dict[str, int]
    codes: dict[str, int]
    attainment: float | None
    goodput: float
    tokens: int
    tokens_per_s: float
    ttft_ms: Spread
    token_gap_ms: Spread
    total_ms: Spread

    @classmethod
    def of(cls, plan: "Plan", url: str, samples: Sequence["Sample"], seconds: float) -> "Report":
        outcomes = Counter(sample.outcome for sample in samples)
        tokens = sum(sample.tokens for sample in samples)
        firsts = [1000 * s.first_s for s in samples if s.first_s is not None]
        gaps = [
            1000 * (s.last_s - s.first_s) / (s.tokens - 1)
            for s in samples
            if s.first_s is not None and s.last_s is not None and s.tokens > 1
        ]
        met = outcomes["met"]
        return cls(
            url=url,
            model=plan.model,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            loop="closed" if plan.rate is None else "open",
            concurrency=plan.concurrency,
            rate=plan.rate,
            max_tokens=plan.max_tokens,
            deadline_ms=plan.deadline_ms,
            first_token_ms=plan.first_token_ms,
            seed=plan.seed,
            requests=len(samples),
            seconds=round(seconds, 3),
            outcomes=dict(outcomes.most_common()),
            codes=dict(Counter(s.code for s in samples if s.code is not None).most_common()),
            attainment=round(met / len(samples), 4) if samples else None,
            goodput=round(met / seconds, 3) if seconds > 0 else 0.0,
            tokens=tokens,
            tokens_per_s=round(tokens / seconds, 1) if seconds > 0 else 0.0,
            ttft_ms=Spread.of(firsts),
            token_gap_ms=Spread.of(gaps),
            total_ms=Spread.of([1000 * s.took_s for s in samples if s.outcome == "met"]),
        )

    def show(self, out: Console) -> None:
        load = f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} at a time"
        out.print(
            f"{self.requests} requests in {self.seconds:.1f} s, {load}, {self.max_tokens} tokens "
            f"each, due in {duration(self.deadline_ms)}",
            style="dim",
        )
        what = " · ".join(f"{name} {number}" for name, number in self.outcomes.items())
        why = ", ".join(f"{code} {number}" for code, number in self.codes.items())
        out.print(f"deadlines kept  {share(self.attainment)}   ({what}{'; ' + why if why else ''})")
        out.print(f"goodput         {self.goodput:.2f} met/s")
        out.print(f"tokens          {count(self.tokens_per_s)}/s ({count(self.tokens)} in all)")
        out.print()
        rows = [
            (name, *(duration(value) for value in (s.p50, s.p90, s.p99, s.most)))
            for name, s in (
                ("first token", self.ttft_ms),
                ("token gap", self.token_gap_ms),
                ("whole, met", self.total_ms),
            )
        ]
        columns = ("", "P50", "P90", "P99", "MAX")
        out.print(table(columns, rows, numbers=columns[1:]))
