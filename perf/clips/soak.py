"""Clips among cancels, dropped connections, bad recipes and short deadlines. It measures the time
of each clip, and checks that nothing grows and that every answer stays correct to the end.

Arrivals are paced, so the run measures latency and not throughput, and may share the machine. Clips
are small. Usage is sampled between clips, every few seconds. In the first tenth of the run, caches
and buffers fill; growth counts from the second tenth on. A run of less than ten minutes cannot show
growth.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from catalog.paths import state_dir
from perf.clips.client import MODEL, ClipReply, ClipRequest, render, render_all
from perf.load.usage import Looks, ServerUsage
from perf.report.bundle import Figure
from perf.stack.stack import triton
from pool.engines.triton import find_triton
from pool.units.triton import TritonInstance

SLOTS: Final = 2
_SETTINGS: Final = {"DEVICE": "cpu", "SIZE": 96, "SECONDS": 4.0, "SLOTS": SLOTS, "BUFFER_S": 0.3}
"""Settings of the slot model (``TIDEGATE_SLOT__…``)."""
GAP_S: Final = 10.0
"""Maximum mean seconds between arrivals; a short run still has thirty arrivals."""
_ARRIVALS: Final = 30
_LONG_S: Final = 600.0
"""Minimum seconds of a run for a check of growth."""
_STAGES: Final = {"audio": "speech", "image": "portrait", "video": "video", "clip": "check"}
_SERVER: Final = "server"
"""Name of Triton, with all of its processes, in the samples."""
_WARM_UP: Final = 4
_PATIENCE_S: Final = 120.0
_CLIPS: Final = 100
MAX_MIB_PER_100: Final = 100.0
_FEW: Final = {"rss_mib": 8.0, "shm_mib": 1.0, "fds": 8.0, "threads": 4.0, "processes": 0.0}
"""Growth below this is ignored."""
_MOMENT_S: Final = 0.05
_ROUNDED: Final = 0.02
"""Share of a frame by which lengths may differ, because seconds are rounded to milliseconds."""
_TEXTS: Final = (
    "Hi.",
    "Good morning to everybody.",
    "The tide turns at six; be there on time, or wait for the next.",
    "Guten Morgen, liebe Leute.",
)
_PROMPTS: Final = (
    "a friendly host",
    "a friendly host, red hair, forest background",
    "an old man with a grey beard and glasses",
)
_BAD: Final[tuple[Any, ...]] = (
    b"{",
    {"schema": "2.0", "text": "Hi."},
    {"schema": "1.0", "text": "Hi.", "video": {"fps": 99}},
    {"schema": "1.0", "text": "Hi.", "voice": {"name": "nobody-at-all"}},
)


@dataclass(frozen=True, slots=True)
class Visit:
    """One arrival: its request, and the codes of correct answers."""

    kind: str
    ask: ClipRequest
    right: frozenset[str]


@dataclass(slots=True)
class ClipSoak:
    """Findings of a soak."""

    replies: list[tuple[float, Visit, ClipReply]] = field(default_factory=list)
    looks: Looks = field(default_factory=Looks)
    faults: list[str] = field(default_factory=list)


def visits(draw: random.Random) -> Iterator[Visit]:
    """Endless arrivals: seven of ten are clips, the others are wrong, late or hang up."""
    while True:
        recipe = {
            "schema": "1.0",
            "text": draw.choice(_TEXTS),
            "portrait": {"prompt": draw.choice(_PROMPTS), "seed": draw.randrange(3)},
            "video": {"fps": draw.choice((6, 12, 24)), "size": draw.choice((64, 96))},
        }
        outputs = draw.choice(("mp4", "mp4,wav,png", "video,audio,actor"))
        whole = ClipRequest(recipe, _PATIENCE_S, outputs=outputs)
        stage = draw.choice(("audio", "image", "video", "clip"))
        kinds = {
            "clip": (70, whole, {"result"}),
            "cancelled": (10, replace(whole, cancel_in=stage), {"result", "cancelled"}),
            "dropped": (4, replace(whole, cancel_in=stage, drop=True), {"result", "cancelled"}),
            "bad recipe": (6, ClipRequest(draw.choice(_BAD)), {"invalid_request"}),
            "short deadline": (
                10,
                replace(whole, deadline_s=draw.uniform(0.32, 2.0), degrade=draw.random() < 0.5),
                {"result", "deadline_exceeded"},
            ),
        }
        (kind,) = draw.choices(list(kinds), [share for share, _, _ in kinds.values()])
        _, ask, right = kinds[kind]
        yield Visit(kind, ask, frozenset(right))


async def soak(server: TritonInstance, seconds: float, seed: int = 1) -> ClipSoak:
    """Send arrivals for ``seconds``, then wait for running requests."""
    assert server.pid is not None
    draw, found, pid = random.Random(seed), ClipSoak(), server.pid
    source, gap_s = visits(draw), min(GAP_S, seconds / _ARRIVALS)
    recipe = {"schema": "1.0", "text": _TEXTS[2], "video": {"fps": 24, "size": 96}}
    largest = ClipRequest(recipe, _PATIENCE_S, outputs="mp4,wav,png,video,audio,actor")
    for _ in range(_WARM_UP):  # in all of the buffers
        await render_all(server.grpc_address, [largest] * SLOTS)
    begun = time.monotonic()
    looking = found.looks.looking(lambda: {_SERVER: ServerUsage.of(pid)})
    async with looking, asyncio.TaskGroup() as group:
        while time.monotonic() - begun < seconds:
            group.create_task(_visit(server, begun, next(source), found))
            await asyncio.sleep(min(draw.expovariate(1 / gap_s), 5 * gap_s))
    judge_answers(found)
    return found


async def _visit(server: TritonInstance, begun: float, visit: Visit, found: ClipSoak) -> None:
    at = time.monotonic() - begun
    reply = await render(server.grpc_address, visit.ask)
    found.replies.append((at, visit, reply))


def judge_answers(found: ClipSoak) -> None:
    """Check that codes are correct, and that equal requests give equal clips. Lengths may differ
    slightly: eSpeak speaks the same text up to 13 ms longer or shorter."""
    seen: dict[str, tuple[float, int, int]] = {}
    for at, visit, reply in found.replies:
        if reply.code not in visit.right:
            found.faults.append(f"at {at:.0f} s, {visit.kind}: {reply.error or reply.code}")
        if visit.kind != "clip" or not reply.is_clip:
            continue
        facts, outputs = reply.facts, visit.ask.outputs
        if set(reply.bytes) != set(outputs.split(",")):
            found.faults.append(f"at {at:.0f} s: {sorted(reply.bytes)} for {outputs}")
        seconds, fps, size = clip = (facts["seconds"], facts["fps"], facts["size"])
        before = seen.setdefault(visit.ask.data.decode(), clip)
        is_same = abs(seconds - before[0]) <= _MOMENT_S and (fps, size) == before[1:]
        more = facts["frames"] - seconds * fps  # the picture never ends before the sound
        is_whole = -_ROUNDED <= more <= 1 + _ROUNDED and not facts["given_up"]
        if not is_same or not is_whole:
            what = f"{clip}, {facts['frames']} frames, given up {facts['given_up']}"
            found.faults.append(f"at {at:.0f} s: {what} where it was {before}")


def growth(found: ClipSoak) -> Mapping[str, tuple[float, float]]:
    """Medians of each measure of usage: in the second tenth and in the last."""
    return {name: found.looks.growth(_SERVER, name) for name in _FEW}


def judge_growth(found: ClipSoak) -> None:
    """Add a fault for each measure that has grown: memory by more than SL-3 allows for the number
    of clips, and anything else by any amount."""
    clips = sum(reply.is_clip for _, _, reply in found.replies)
    for name, (before, after) in growth(found).items():
        allowed = _FEW[name]
        if name == "rss_mib":
            allowed = max(allowed, MAX_MIB_PER_100 * clips / _CLIPS)
        if after - before > allowed:
            found.faults.append(f"{name} grew from {before:.1f} to {after:.1f}")


def figures(found: ClipSoak) -> list[Figure]:
    """Figures of the run."""
    of, made = Figure.of, []
    for name, (before, after) in growth(found).items():
        label, unit = (name, "MiB" if name.endswith("mib") else "")
        label = f"{label}: growth from the second tenth to the last"
        made.append(of(f"soak.{name}.growth", label, unit, [after - before]))
    made.append(of("soak.seconds", "length", "s", [found.looks.seconds]))
    made.append(of("soak.arrivals", "arrivals", "", [len(found.replies)]))
    made.append(of("soak.faults", "wrong answers and growth", "", [len(found.faults)]))
    codes = Counter((visit.kind, reply.code) for _, visit, reply in found.replies)
    for (kind, code), count in sorted(codes.items()):
        made.append(of(f"soak.{kind}.{code}", f"{kind}: {code}", "", [count]))
    return made + _times([reply for _, visit, reply in found.replies if visit.kind == "clip"])


def _times(clips: list[ClipReply]) -> list[Figure]:
    """Times of whole clips: each stage, and the total for the client (SL-6)."""
    figures: list[Figure] = []
    for key, label in (*_STAGES.items(), ("latency", "a clip")):
        values = [
            1000 * clip.latency_s if key == "latency" else float(clip.facts.get(f"{key}_ms", 0.0))
            for clip in clips
        ]
        if any(values):
            figures += [
                Figure.tail_of(f"clip.{key}.p{q}_ms", f"{label}, p{q}", "ms", values, q)
                for q in (50, 95, 99)
            ]
    return figures


async def run(seconds: float, seed: int = 1) -> tuple[list[Figure], list[str], str]:
    """Start a server and soak it; return figures, faults and Triton's version."""
    env = {f"TIDEGATE_SLOT__{name}": str(value) for name, value in _SETTINGS.items()}
    async with triton("slot-soak", MODEL, env) as server:
        found = await soak(server, seconds, seed)
        if seconds >= _LONG_S:
            judge_growth(found)
        return figures(found), found.faults, find_triton(None, state_dir()).version
