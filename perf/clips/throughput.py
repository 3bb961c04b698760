"""Clips per minute and latency, by clients that ask again as soon as they have one; by what each
stage takes; and what stays in memory.

Ours is the slot model on the real Triton by gRPC; beside it the naive pipeline by HTTP, one clip
after the other and all at once. In turns, order turned round by round; ratios are of one round.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from perf.clips.client import ClipRequest, Reply
from perf.clips.naive_server import AT_ONCE
from perf.clips.rig import OURS, SlotRig, System, recipe_of
from perf.load.usage import Usage
from perf.report.bundle import Figure

LEVELS = (1, 4)
_STAGES = {"audio": "speech", "image": "portrait", "video": "video", "clip": "check"}
_LONGEST = ("p50", 50), ("p95", 95), ("p99", 99)


@dataclass(frozen=True, slots=True)
class ClipTurn:
    """Clips that one system rendered for ``clients`` in a turn."""

    replies: list[Reply]
    seconds: float
    cpu_s: float

    @property
    def per_minute(self) -> float:
        return 60 * len(self.replies) / self.seconds

    @property
    def cpu_per_clip_s(self) -> float:
        return self.cpu_s / len(self.replies)


async def closed_loop(system: System, clients: int, clips: int) -> ClipTurn:
    """Have ``clips`` rendered by ``clients`` in all. Raises ``RuntimeError`` when one fails."""
    left, replies = itertools.count(), list[Reply]()

    async def one() -> None:
        while next(left) < clips:
            reply = await system.client.render(ClipRequest(recipe_of()))
            if not reply.is_clip:
                raise RuntimeError(f"{system.label}: {reply.error}")
            replies.append(reply)

    cpu_s, begun = system.cpu_s(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())
    seconds = time.monotonic() - begun
    return ClipTurn(replies, seconds, system.cpu_s() - cpu_s)


async def run(rig: SlotRig) -> list[Figure]:
    rounds, clips = (2, 4) if rig.quick else (6, 12)
    turns: dict[tuple[str, int], list[ClipTurn]] = {}
    before = {name: Usage.of(system.pid) for name, system in rig.systems.items()}
    for number in range(rounds):
        order = list(rig.systems.values())
        order = order[number % len(order) :] + order[: number % len(order)]
        for clients in LEVELS:
            for system in order:
                if clients == 1 and system.name == AT_ONCE:
                    continue  # alone it is the other naive one
                turn = await closed_loop(system, clients, clips)
                turns.setdefault((system.name, clients), []).append(turn)
    figures = []
    for clients in LEVELS:
        figures += _level(rig, turns, clients)
    figures += _stages([r for turn in turns[OURS, 1] for r in turn.replies])
    made = {
        name: sum(
            len(turn.replies) for (who, _), some in turns.items() if who == name for turn in some
        )
        for name in rig.systems
    }
    for name, system in rig.systems.items():
        after = Usage.of(system.pid)
        grown = 100 * (after.rss_mib - before[name].rss_mib) / made[name]
        figures += [
            Figure.of(
                f"memory.{name}.rss_mib", f"{system.label}: resident", "MiB", [after.rss_mib]
            ),
            Figure.of(
                f"memory.{name}.growth_mib",
                f"{system.label}: growth per 100 clips, over {made[name]}",
                "MiB",
                [grown],
            ),
        ]
    return figures


def _level(
    rig: SlotRig, turns: dict[tuple[str, int], list[ClipTurn]], clients: int
) -> list[Figure]:
    figures = []
    at = f"{clients} at once" if clients > 1 else "one at a time"
    ours = turns[OURS, clients]
    for name, system in rig.systems.items():
        its = turns.get((name, clients))
        if its is None:
            continue
        label, key = f"{system.label}, {at}", f"{name}.{clients}"
        latencies = [1000 * r.latency_s for turn in its for r in turn.replies]
        of = Figure.of
        figures += [
            of(
                f"throughput.{key}.per_minute",
                f"{label}: clips per minute",
                "",
                [turn.per_minute for turn in its],
                better="higher",
            ),
            of(
                f"throughput.{key}.latency_ms",
                f"{label}: a clip",
                "ms",
                latencies,
                spread="p5–p95",
            ),
            of(
                f"throughput.{key}.cpu_s",
                f"{label}: CPU per clip",
                "s",
                [turn.cpu_per_clip_s for turn in its],
            ),
        ]
        if name != OURS:
            figures += _ratios(ours, its, f"{clients}.{name}", f"{at}, Tidegate ÷ {system.label}")
    return figures


def _ratios(
    ours: Sequence[ClipTurn], its: Sequence[ClipTurn], key: str, label: str
) -> list[Figure]:
    pairs = list(zip(ours, its, strict=True))
    per_minute = [a.per_minute / b.per_minute for a, b in pairs]
    cpu = [a.cpu_per_clip_s / b.cpu_per_clip_s for a, b in pairs]
    return [
        Figure.of(
            f"ratio.{key}.per_minute", f"{label}: clips per minute", "", per_minute, better="higher"
        ),
        Figure.of(f"ratio.{key}.cpu", f"{label}: CPU per clip", "", cpu),
    ]


def _stages(replies: Sequence[Reply]) -> list[Figure]:
    figures = []
    for stage, label in _STAGES.items():
        values = [float(r.facts[f"{stage}_ms"]) for r in replies]
        for name, q in _LONGEST:
            key = f"stage.{stage}.{name}_ms"
            figures.append(Figure.tail_of(key, f"{label}, {name}", "ms", values, q))
    rest = [1000 * r.latency_s - float(r.facts["total_ms"]) for r in replies]
    label = "encoding, Triton and the way"
    figures.append(Figure.of("stage.rest_ms", label, "ms", rest, spread="p5–p95"))
    return figures
