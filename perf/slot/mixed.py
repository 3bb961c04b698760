"""Text and clips on the same machine: what of either is in time alone, and what beside the other.

Text is stories of the demo model through the orchestrator, from clients with 1, 3 and 8 s; clips
are of unknown lengths, by plain ``tritonclient``, and may give less. Both arrive as Poisson
processes and hang up at their deadlines; the same arrivals alone and together, in turns; without
the rule for sharing and with it, which has clips rendered by threads of a lower priority.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perf.goodput.cell import is_met
from perf.goodput.load import log_normal, story_load
from perf.load.connection import HOST
from perf.load.drive import apply_open_loop
from perf.load.open_loop import OpenLoopPlan
from perf.load.trace import Manner
from perf.report.bundle import Figure
from perf.report.stats import median
from perf.slot.client import Ask, SlotClient
from perf.slot.deadlines import Arrival, Window, arrivals, offer
from perf.slot.rig import OURS, SPEC, WARM_UP, Rig, System, recipe_of
from perf.slot.stack import serving
from perf.stack.stack import Stack, StackSpec, running

LOADS = (("moderate", 3.0, 1.0), ("heavy", 8.0, 3.0))
"""Requests of text and clips per second."""
NICE = 10
_SEED = 21
_LINGER_S = 8.0


@dataclass(frozen=True, slots=True)
class Text:
    """What came of the requests of one window."""

    offered: int
    met: int


async def run(rig: Rig) -> list[Figure]:
    window_s, seeds = (3.0, 1) if rig.quick else (6.0, 3)
    loads = LOADS[:1] if rig.quick else LOADS
    async with (
        running(StackSpec()) as text,
        serving(SPEC, "slot-mixed") as equal,
        serving(replace(SPEC, nice=NICE), "slot-quiet") as quiet,
        SlotClient(equal.grpc_address) as to_equal,
        SlotClient(quiet.grpc_address) as to_quiet,
    ):
        beside = {
            "beside": System(OURS, "clips", to_equal, equal.pid),
            "quiet": System(OURS, f"clips at nice {NICE}", to_quiet, quiet.pid),
        }
        for system in beside.values():
            warm = [await system.client.render(Ask(recipe_of())) for _ in range(WARM_UP)]
        clip_s = median([reply.latency_s for reply in warm[WARM_UP // 2 :]])
        await _text(text, 4.0, 2.0, _SEED)
        figures = []
        for name, text_per_s, clips_per_s in loads:
            texts: dict[str, list[Text]] = {}
            windows: dict[str, list[Window]] = {}
            for seed in range(_SEED, _SEED + seeds):
                some = arrivals(clips_per_s, window_s, clip_s, seed, degrade=True)
                texts.setdefault("alone", []).append(await _text(text, text_per_s, window_s, seed))
                windows.setdefault("alone", []).append(await offer(beside["beside"], some))
                order = list(beside.items())
                for key, system in order if seed % 2 else reversed(order):
                    both = await asyncio.gather(
                        _text(text, text_per_s, window_s, seed), _later(system, some)
                    )
                    texts.setdefault(key, []).append(both[0])
                    windows.setdefault(key, []).append(both[1])
            at = f"{text_per_s:g} texts/s, {clips_per_s:g} clips/s"
            figures += _of_texts(name, at, texts) + _of_clips(name, at, windows)
        return figures


async def _later(clips: System, some: Sequence[Arrival]) -> Window:
    """The other generator is a process, which takes a moment to start."""
    await asyncio.sleep(0.3)
    return await offer(clips, some)


async def _text(stack: Stack, per_s: float, seconds: float, seed: int) -> Text:
    load = story_load(log_normal(seed), Manner.CONSTANT, "demo", is_poisson=True)
    asks = load.asks(per_s, seconds, seed)
    plan = OpenLoopPlan(HOST, stack.port, load.path, asks, True, _LINGER_S, True)
    results = await apply_open_loop(plan)
    return Text(len(asks), sum(map(is_met, asks, results)))


def _of_texts(name: str, at: str, found: dict[str, list[Text]]) -> list[Figure]:
    labels = {
        "alone": "text alone",
        "beside": "text beside clips",
        "quiet": f"text beside clips at nice {NICE}",
    }
    return [
        Figure.of(
            f"mixed.{name}.text.{key}",
            f"{at}, {labels[key]}: met",
            "%",
            [100 * text.met / max(1, text.offered) for text in texts],
            better="higher",
        )
        for key, texts in found.items()
    ]


def _of_clips(name: str, at: str, found: dict[str, list[Window]]) -> list[Figure]:
    labels = {
        "alone": "clips alone",
        "beside": "clips beside text",
        "quiet": f"clips at nice {NICE} beside text",
    }
    outcomes = (
        ("in_time", ("whole", "less"), "in time"),
        ("less", ("less",), "of them with less"),
        ("late", ("late",), "late"),
    )
    return [
        Figure.of(
            f"mixed.{name}.clips.{key}.{what}",
            f"{at}, {labels[key]}: {words}",
            "%",
            [100 * _count(each.counts, counted) / each.offered for each in windows],
            better="higher" if what == "in_time" else "lower",
        )
        for key, windows in found.items()
        for what, counted, words in outcomes
    ]


def _count(counts: Counter[str], what: Sequence[str]) -> int:
    return sum(counts[each] for each in what)
