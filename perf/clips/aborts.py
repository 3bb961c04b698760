"""From a client's cancel to the next clip's beginning, by the stage that was cancelled: one slot,
and another client waits for it. On the naive server nobody hears of it: the next one waits for the
rest of the clip that nobody wants.
"""

import asyncio
from dataclasses import replace

from perf.clips.client import Client, ClipRequest, NaiveClient, SlotClient
from perf.clips.naive_server import SEQUENTIAL
from perf.clips.rig import LONG_TEXT, SPEC, WARM_UP, SlotRig, recipe_of
from perf.clips.stack import serving
from perf.report.bundle import Figure
from perf.stack.stack import server

_ONE = replace(SPEC, slots=1, size=256)
_STAGES = {"audio": "speech", "image": "portrait", "video": "video", "clip": "check"}
_LONG = recipe_of(LONG_TEXT)
_SHORT = recipe_of("Hi.", size=64, fps=6)
_PATIENCE_S = 120.0


async def run(rig: SlotRig) -> list[Figure]:
    n = 2 if rig.quick else 8
    arguments = (SEQUENTIAL, str(_ONE.size), str(_ONE.seconds), "1")
    async with (
        serving(_ONE, "slot-one") as ours,
        server("perf.clips.naive_server", *arguments) as naive,
        SlotClient(ours.grpc_address) as to_ours,
        NaiveClient(naive.url) as to_naive,
    ):
        for _ in range(WARM_UP):
            await to_ours.render(ClipRequest(_SHORT))
        for client in (to_ours, to_naive):
            await client.render(ClipRequest(_LONG))
        freed: dict[str, list[float]] = {}
        for _ in range(n):
            for stage in _STAGES:
                freed.setdefault(stage, []).append(1000 * await _ours(to_ours, stage))
            freed.setdefault(SEQUENTIAL, []).append(1000 * await _naive(to_naive))
    figures = [
        Figure.of(
            f"abort.{stage}_ms",
            f"cancelled as {label} begins: the next one begins after",
            "ms",
            freed[stage],
            spread="p5–p95",
        )
        for stage, label in _STAGES.items()
    ]
    label = "naive, hung up after a third: the next one begins after"
    return [
        *figures,
        Figure.of("abort.naive_ms", label, "ms", freed[SEQUENTIAL], spread="p5–p95"),
    ]


async def _ours(client: Client, stage: str) -> float:
    cancelled = asyncio.create_task(
        client.render(ClipRequest(_LONG, _PATIENCE_S, cancel_in=stage, outputs="wav"))
    )
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(client.render(ClipRequest(_SHORT, _PATIENCE_S)))
    gone = await cancelled
    came = await waiting
    if not came.is_clip:
        raise RuntimeError(came.error)
    return came.began_at - gone.ended_at


async def _naive(client: Client) -> float:
    """Seconds from a cancel to the next clip's beginning: its end less what it takes by itself."""
    whole = await client.render(ClipRequest(_LONG, _PATIENCE_S))
    alone = await client.render(ClipRequest(_SHORT, _PATIENCE_S))
    leaving = asyncio.create_task(client.render(ClipRequest(_LONG, whole.latency_s / 3)))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(client.render(ClipRequest(_SHORT, _PATIENCE_S)))
    gone = await leaving
    came = await waiting
    return max(0.0, came.ended_at - alone.latency_s - gone.ended_at)
