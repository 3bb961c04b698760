"""What ``/v2/slots`` adds to a clip: the same clips on the same Triton, through the orchestrator
and by plain ``tritonclient``, in turns; latency in pairs, and the orchestrator's CPU.

Through the orchestrator a client asks, follows the events and fetches the file, as three requests.
"""

import json
import time
from typing import Self

import aiohttp

from perf.load.usage import cpu_s
from perf.report.bundle import Figure
from perf.slot.client import Ask, Client, Reply, SlotClient
from perf.slot.rig import SPEC, WARM_UP, Rig, recipe_of
from perf.slot.stack import serving
from perf.stack.stack import orchestrating


class OrchestratorClient:
    """A connection pool to ``/v2/slots``."""

    def __init__(self, url: str) -> None:
        self._session = aiohttp.ClientSession(url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def render(self, ask: Ask) -> Reply:
        """As ``SlotClient.render``; ``bytes`` has the MP4's only."""
        reply = Reply(time.monotonic())
        body = {
            "recipe": ask.recipe,
            "deadline_ms": round(1000 * ask.deadline_s),
            "on_deadline": "degrade" if ask.degrade else "error",
        }
        async with self._session.post("/v2/slots", json=body) as answer:
            slot = await answer.json()
            if answer.status != 202:
                reply.error, reply.ended_at = slot["error"]["code"], time.monotonic()
                return reply
        event = ""
        async with self._session.get(slot["events_url"]) as events:
            async for line in events.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    event = value
                elif name == "data" and event == "stage":
                    reply.began_at = reply.began_at or time.monotonic()
                elif name == "data" and event in ("result", "error"):
                    facts = json.loads(value)
                    if event == "error":
                        reply.error = facts["error"]["code"]
                    else:
                        reply.facts = {"event": "result", **facts}
        if reply.is_clip:
            async with self._session.get(reply.facts["outputs"]["mp4"]) as file:
                reply.bytes = {"mp4": len(await file.read())}
        reply.ended_at = time.monotonic()
        return reply


async def _clip(client: Client) -> float:
    """Milliseconds."""
    reply = await client.render(Ask(recipe_of()))
    if not reply.is_clip or not reply.bytes["mp4"]:
        raise RuntimeError(reply.error or "no clip")
    return 1000 * reply.latency_s


async def run(rig: Rig) -> list[Figure]:
    rounds = 4 if rig.quick else 40
    async with (
        serving(SPEC, "slot-through") as triton,
        orchestrating([triton.grpc_address], {}) as orchestrator,
        SlotClient(triton.grpc_address) as plain,
        OrchestratorClient(orchestrator.url) as through,
    ):
        assert orchestrator.pid is not None
        for _ in range(WARM_UP):
            await _clip(plain)
            await _clip(through)
        plains, throughs, cpu_ms = [], [], []
        for number in range(rounds):
            order = (plain, through) if number % 2 else (through, plain)
            for client in order:
                before = cpu_s(orchestrator.pid)
                took_ms = await _clip(client)
                if client is plain:
                    plains.append(took_ms)
                else:
                    throughs.append(took_ms)
                    cpu_ms.append(1000 * (cpu_s(orchestrator.pid) - before))
    added = [b - a for a, b in zip(plains, throughs, strict=True)]
    of = Figure.of
    return [
        of("through.plain_ms", "a clip by plain tritonclient", "ms", plains, spread="p5–p95"),
        of("through.clip_ms", "a clip over /v2/slots", "ms", throughs, spread="p5–p95"),
        of("through.added_ms", "added, in pairs", "ms", added, spread="p25–p75"),
        of("through.cpu_ms", "the orchestrator's CPU per clip", "ms", cpu_ms, spread="p5–p95"),
    ]
