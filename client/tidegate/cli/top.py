"""``tidegate top``: looks at a service again and again, and draws it."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.arguments import SECONDS, Command, asks, option
from tidegate.cli.terminal import console, count, duration, print_json, share, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tidegate.client import Client
    from tidegate.results import Instance, InstanceSlot

DESCRIPTION = """\
A service as it works: instances, queue, outcomes, goodput, KV. Ctrl-C leaves.

  tidegate top
  tidegate top --once            one picture, of the next second, for scripts and pipes
  tidegate top --json            the same as JSON
"""

_MIN_S = 0.05
"""Shortest pause in seconds between two looks: the service has other work, too."""
_OUTCOMES = ("met", "partial", "missed", "refused", "aborted", "failed")
_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_Labels = dict[str, str]


@click.command(cls=Command, help=DESCRIPTION, short_help="watch it work")
@option("--every", type=SECONDS, default=1.0, metavar="S", help="seconds between two looks")
@option("--once", is_flag=True, help="one picture, then leave")
@asks()
async def top(client: "Client", every: float, once: bool, as_json: bool) -> int:
    from rich.live import Live

    from tidegate import _clock
    from tidegate.errors import TidegateError

    out = console()
    picture = await _look(client)
    if once or as_json or not out.is_terminal or out.is_dumb_terminal:
        if every:  # or nothing could be said of rates
            await _clock.sleep(every)
            picture = await _look(client, picture.samples)
        if as_json:
            print_json(picture.facts())
        else:
            out.print(picture.render())
        return 0
    with Live(picture.render(), console=out, screen=True, auto_refresh=False) as live:
        while True:
            await _clock.sleep(max(every, _MIN_S))
            try:
                picture = await _look(client, picture.samples)
            except TidegateError as error:
                picture = replace(picture, error=" ".join(str(error).split()))
            live.update(picture.render(), refresh=True)


async def _look(client: "Client", before: "Samples | None" = None) -> "Picture":
    """Take one look; rates count from ``before``."""
    from tidegate import _clock

    instances = await client.instances()
    samples = Samples.parse(await client.metrics(), _clock.now())
    return Picture(client.base_url, instances, samples, before)


@dataclass(frozen=True, slots=True)
class Samples:
    """All values of one scrape, taken ``at`` seconds of our clock."""

    at: float
    values: dict[str, list[tuple[_Labels, float]]]

    @classmethod
    def parse(cls, text: str, at: float) -> "Samples":
        values: dict[str, list[tuple[_Labels, float]]] = {}
        for found in _LINE.finditer(text):
            labels = dict(_LABEL.findall(found["labels"] or ""))
            try:
                value = float(found["value"])
            except ValueError:
                continue
            if not math.isnan(value):  # else there is nothing to show yet
                values.setdefault(found["name"], []).append((labels, value))
        return cls(at, values)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of all series with these labels; None where there is none."""
        found = [value for _, value in self._of(name, labels)]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of ``label``."""
        sums: dict[str, float] = {}
        for labels, value in self._of(name, {}):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    @property
    def processes(self) -> int:
        """How many processes at one port the scrape covers."""
        return max(1, len(self.values.get("tidegate_attainment", ())))

    def rate(self, name: str, before: "Samples | None", **labels: str) -> float | None:
        """Growth per second since ``before``; None for the first look."""
        now, then = self.total(name, **labels), before and before.total(name, **labels)
        if now is None or before is None or self.at <= before.at:
            return None
        return max(0.0, now - (then or 0.0)) / (self.at - before.at)

    def quantile(self, name: str, part: float, before: "Samples | None" = None) -> float | None:
        """Upper end of the bucket with a quantile (0 to 1) since ``before``; None without any."""
        new = self._buckets(name)
        old = {} if before is None else before._buckets(name)
        counts = sorted((end, count - old.get(end, 0.0)) for end, count in new.items())
        if not counts or counts[-1][1] <= 0:
            return None
        return next(end for end, count in counts if count >= part * counts[-1][1])

    def _buckets(self, name: str) -> dict[float, float]:
        return {float(end): n for end, n in self.by(f"{name}_bucket", "le").items() if end}

    def _of(self, name: str, wanted: _Labels) -> Iterator[tuple[_Labels, float]]:
        for labels, value in self.values.get(name, ()):
            if all(labels.get(key) == text for key, text in wanted.items()):
                yield labels, value


@dataclass(frozen=True, slots=True)
class Picture:
    """One look at a service; rates count from the look ``before``."""

    url: str
    instances: "Sequence[Instance]"
    samples: Samples
    before: Samples | None = None
    error: str = ""
    """Why the figures are out of date."""

    def facts(self) -> dict[str, Any]:
        """Figures for programs. Times are milliseconds, shares 0 to 1."""
        samples, outcomes = self.samples, self.samples.by("tidegate_outcomes_total", "outcome")
        tokens = samples.total("tidegate_tokens_generated_total")
        wasted = samples.total("tidegate_tokens_wasted_total") or 0.0
        ended, met = sum(outcomes.values()), outcomes.get("met", 0.0)
        return {
            "url": self.url,
            "instances": self.instances,
            "queue": {
                "waiting": samples.total("tidegate_queue_depth"),
                "work_ms": samples.total("tidegate_queue_work_ms"),
            },
            "outcomes": {name: outcomes.get(name, 0.0) for name in _OUTCOMES},
            "offered": samples.total("tidegate_offered_total"),
            "tokens": tokens,
            "attainment": met / ended if ended else None,
            "waste": wasted / tokens if tokens else None,
            "offered_per_s": samples.rate("tidegate_offered_total", self.before),
            "met_per_s": samples.rate("tidegate_outcomes_total", self.before, outcome="met"),
            "tokens_per_s": samples.rate("tidegate_tokens_generated_total", self.before),
            "ttft_p50_ms": samples.quantile("tidegate_ttft_ms", 0.5),
            "ttft_p99_ms": samples.quantile("tidegate_ttft_ms", 0.99),
            # Each process reports all blocks.
            "kv_blocks": {
                kind: blocks / samples.processes
                for kind, blocks in samples.by("tidegate_kv_blocks", "kind").items()
            },
        }

    def render(self) -> "RenderableType":
        """Figures for people, to be drawn in a terminal."""
        from rich.console import Group
        from rich.text import Text

        facts = self.facts()
        ready = sum(instance.ready for instance in self.instances)
        wanted = sum(instance.is_for_text for instance in self.instances)
        text = Text(f"{self.url}   {ready} of {wanted} instances ready\n", style="bold")
        if self.error:
            text.append(f"not updated: {self.error}\n", style="red")
        met, offered, tokens = (
            "–" if (rate := facts[f"{name}_per_s"]) is None else f"{rate:.1f}"
            for name in ("met", "offered", "tokens")
        )
        half, most = (
            _end(self.samples.quantile("tidegate_ttft_ms", part, self.before))
            for part in (0.5, 0.99)
        )
        there = (f"{name} {count(n)}" for name, n in facts["outcomes"].items() if n)
        waiting, work = facts["queue"].values()
        for title, value, rest in (
            ("queue", f"{count(waiting)} waiting", f"{duration(work)} of work"),
            ("goodput", f"{met} met/s", f"of {offered} offered/s, {tokens} tokens/s"),
            ("kept", share(facts["attainment"]), f"{share(facts['waste'])} of tokens wasted"),
            ("first token", f"p50 {half}", f"p99 {most}"),
            ("outcomes", " · ".join(there) or "–", ""),
        ):
            text.append(f"\n{title:<13}", style="not bold dim").append(value)
            text.append(f"   {rest}", style="not bold")
        return Group(text, Text(), self._instances())

    def _instances(self) -> "RenderableType":
        columns = ["INSTANCE", "STATE", "MODEL", "DEVICE", "JOBS", "SLOTS", "TOKENS/S", "KV IN USE"]
        rows = [self._instance(instance) for instance in self.instances]
        if any(instance.slot is not None for instance in self.instances):
            columns.append("CLIPS")
            clips = [_clips(instance.slot) for instance in self.instances]
            rows = [(*row, words) for row, words in zip(rows, clips, strict=True)]
        return table(columns, rows, numbers=columns[4:8])

    def _instance(self, instance: "Instance") -> tuple[str, ...]:
        state = "draining" if instance.draining else instance.state
        if instance.breaker not in ("", "closed"):
            state += f", breaker {instance.breaker}"
        slots = "–"
        if instance.slots_total is not None:
            taken = instance.slots_total - (instance.slots_free or 0)
            slots = f"{taken}/{instance.slots_total}"
        used, free = (
            self.samples.total("tidegate_kv_blocks", instance=instance.address, kind=kind) or 0.0
            for kind in ("used", "free")
        )
        return (
            instance.address,
            state,
            instance.model or "–",
            instance.device or "–",
            count(instance.load),
            slots,
            count(instance.perf_tokens_per_s),
            share(used / (used + free) if used + free else None),
        )


def _clips(slot: "InstanceSlot | None") -> str:
    if slot is None:
        return "–"
    if slot.state != "up":
        return slot.state
    return f"{slot.slots_total - slot.slots_free}/{slot.slots_total}"


def _end(value: float | None) -> str:
    """Upper end of the bucket that a quantile is in, in milliseconds, as text."""
    if value is None:
        return "–"
    return "over the last bucket" if value == math.inf else f"≤ {duration(value)}"
