"""Servers that take turns, and recipes: what the benchmarks of this folder share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from perf.clips.client import Client, ClipRequest, NaiveClient, SlotClient
from perf.clips.naive_server import AT_ONCE, SEQUENTIAL
from perf.clips.stack import SlotSpec, serving
from perf.load.usage import cpu_s
from perf.stack.stack import server

SPEC: Final = SlotSpec(
    size=128,
    seconds=6.0,
    buffer_s=0.2,
    more={"OMP_NUM_THREADS": "1"},
    constants={"clips.render.stage_runner.NICE": 0},  # clips want the cores as much as anybody
)
"""Settings of ours: as eager as the naive ones. One thread for each stage, for the naive ones too:
torch's own choice is a thread for each core, and on cores that have other work too these wait for
each other."""
OURS: Final = "ours"
WARM_UP: Final = 10
"""Number of clips to warm up: as many as predictions want, and more."""
TEXT: Final = "Good morning to everybody, the tide turns at six."


@dataclass(frozen=True, slots=True)
class System:
    """One server and a connection to it."""

    name: str
    label: str
    client: Client
    pid: int

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


@dataclass(slots=True)
class SlotRig:
    """Systems by name. All stay up; only one has something to do at a time."""

    quick: bool
    systems: dict[str, System] = field(default_factory=dict)
    triton_version: str = ""


def recipe_of(text: str = TEXT, *, size: int = 0, fps: int = 24) -> dict[str, Any]:
    return {"schema": "1.0", "text": text, "video": {"fps": fps, "size": size}}


@asynccontextmanager
async def rigged(*, quick: bool) -> AsyncIterator[SlotRig]:
    """Start ours and both naive servers, and warm them up."""

    def naive(mode: str) -> Any:
        return server("perf.clips.naive_server", mode, str(SPEC.size), str(SPEC.seconds), "1")

    async with (
        serving(SPEC) as ours,
        naive(SEQUENTIAL) as one_by_one,
        naive(AT_ONCE) as at_once,
        SlotClient(ours.grpc_address) as to_ours,
        NaiveClient(one_by_one.url) as to_one_by_one,
        NaiveClient(at_once.url) as to_at_once,
    ):
        assert one_by_one.pid is not None and at_once.pid is not None
        systems = (
            System(OURS, "Tidegate", to_ours, ours.pid),
            System(SEQUENTIAL, "one after the other", to_one_by_one, one_by_one.pid),
            System(AT_ONCE, "all at once", to_at_once, at_once.pid),
        )
        rig = SlotRig(quick, {system.name: system for system in systems}, ours.triton_version)
        for system in systems:
            for _ in range(WARM_UP):
                reply = await system.client.render(ClipRequest(recipe_of()))
                if not reply.is_clip:
                    raise RuntimeError(f"{system.label}: {reply.error}")
        yield rig
