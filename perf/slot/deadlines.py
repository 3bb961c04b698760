"""Fate of clips under overload, when more is asked for than can be rendered, of unknown lengths, by
clients who hang up in time.

Their patience is in multiples of what a clip takes by itself, behind the buffer that is kept back.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from perf.report.bundle import Figure
from perf.report.stats import median
from perf.slot.client import ClipRequest, Reply
from perf.slot.rig import OURS, SPEC, SlotRig, System, recipe_of
from perf.slot.throughput import closed_loop

LOADS = (0.5, 1.5)
"""Loads in multiples of what the cores could make of clips if nothing else wanted them, by the CPU
that one takes: what is made in a while depends on who else is there meanwhile."""
PATIENCE = (3.0, 6.0, 15.0)
"""Patience of clients, in multiples of what a clip takes; each kind asks as often as the others."""
_LINGER_S = 30.0
_SEED = 11
_TEXT = "the tide turns at six be there on time or wait for the next"


def outcome(ask: ClipRequest, reply: Reply) -> str:
    """Outcome of a clip by the client's own clock, on which the answer's way counts too."""
    if not reply.is_clip:
        return "stopped" if reply.began_at else "refused"
    if reply.latency_s > ask.deadline_s:
        return "late"
    return "less" if reply.facts["given_up"] else "whole"


@dataclass(frozen=True, slots=True)
class ClipArrival:
    at_s: float
    ask: ClipRequest


def arrivals(
    per_s: float, seconds: float, clip_s: float, seed: int, *, degrade: bool
) -> list[ClipArrival]:
    """Arrivals of a Poisson process; texts of two words to the longest that there are buffers for;
    the same for a seed, whatever ``degrade`` is."""
    draw, at_s = random.Random(seed), 0.0
    made: list[ClipArrival] = []
    while True:
        at_s += draw.expovariate(per_s)
        if at_s > seconds:
            return made
        count = max(2, min(24, round(draw.lognormvariate(2.0, 0.6))))
        text = " ".join(draw.choice(_TEXT.split()) for _ in range(count)) + "."
        patience_s = SPEC.buffer_s + draw.choice(PATIENCE) * clip_s
        made.append(ClipArrival(at_s, ClipRequest(recipe_of(text), patience_s, degrade)))


async def overload(rig: SlotRig) -> list[Figure]:
    """Goodput under overload: clips in time per minute."""
    window_s, seeds = (3.0, 1) if rig.quick else (6.0, 2)
    loads = LOADS[1:] if rig.quick else LOADS
    most = await closed_loop(rig.ours, 4, 8 if rig.quick else 16)
    alone = await closed_loop(rig.ours, 1, 4 if rig.quick else 8)
    clip_s = median([reply.latency_s for reply in alone.replies])
    capacity = len(os.sched_getaffinity(0)) / most.cpu_per_clip_s
    label = "capacity: cores, by the CPU that a clip takes"
    figures = [Figure.of("overload.capacity", label, "1/s", [capacity])]
    ways = [("degrade", rig.ours, True), ("error", rig.ours, False)]
    ways += [(name, system, False) for name, system in rig.systems.items() if name != OURS]
    for load in loads:
        found: dict[str, list[Window]] = {}
        for seed in range(_SEED, _SEED + seeds):
            for name, system, degrade in ways:
                some = arrivals(load * capacity, window_s, clip_s, seed, degrade=degrade)
                found.setdefault(name, []).append(await offer(system, some))
        figures += _of_load(rig, load, found)
    return figures


@dataclass(frozen=True, slots=True)
class Window:
    """Outcomes of some arrivals, and the seconds until the last was answered."""

    counts: Counter[str]
    offered: int
    seconds: float
    cpu_s: float

    @property
    def in_time(self) -> int:
        return self.counts["whole"] + self.counts["less"]

    @property
    def per_minute(self) -> float:
        return 60 * self.in_time / self.seconds


async def offer(system: System, some: Sequence[ClipArrival]) -> Window:
    begun, cpu_s = time.monotonic(), system.cpu_s()

    async def one(arrival: ClipArrival) -> str:
        await asyncio.sleep(begun + arrival.at_s - time.monotonic())
        return outcome(arrival.ask, await system.client.render(arrival.ask))

    outcomes = await asyncio.gather(*(one(arrival) for arrival in some))
    seconds = time.monotonic() - begun
    await _until_idle(system)
    return Window(Counter(outcomes), len(some), seconds, system.cpu_s() - cpu_s)


async def _until_idle(system: System) -> None:
    """Wait until a system has nothing left to do for clients that are gone, by its use of the
    CPU."""
    end = time.monotonic() + _LINGER_S
    while time.monotonic() < end:
        before = system.cpu_s()
        await asyncio.sleep(0.2)
        if system.cpu_s() - before < 0.02:
            return


def _of_load(rig: SlotRig, load: float, found: dict[str, list[Window]]) -> list[Figure]:
    labels = {
        "degrade": "Tidegate, may give less",
        "error": "Tidegate, all or nothing",
        **{name: system.label for name, system in rig.systems.items()},
    }
    figures = []
    for name, windows in found.items():
        label, key = f"{load:g} × capacity, {labels[name]}", f"overload.{load:g}.{name}"
        of = Figure.of
        offered = sum(window.offered for window in windows)
        figures += [
            of(
                f"{key}.per_minute",
                f"{label}: in time per minute",
                "",
                [window.per_minute for window in windows],
                better="higher",
            ),
            *(
                of(
                    f"{key}.{what}",
                    f"{label}: {text}",
                    "%",
                    [100 * sum(window.counts[what] for window in windows) / offered],
                )
                for what, text in (
                    ("whole", "in time, whole"),
                    ("less", "in time with less"),
                    ("late", "late"),
                )
            ),
            of(
                f"{key}.cpu_s",
                f"{label}: CPU per clip in time",
                "s",
                [window.cpu_s / max(1, window.in_time) for window in windows],
            ),
        ]
    return figures
