"""A device that dies in every way, a step that never ends among them: its worker's process ends,
its streams go on elsewhere (OR-6, OR-11)."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from pool.process.proc import ProcessId
from tests.support.processes import eventually
from tests.support.sse import read_events
from tests.support.stack import Orchestrator, Triton, running, started
from worker.runner.simulated_device import DeviceFault

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TASK = {"model": "demo", "prompt": "Time", "max_tokens": 60, "ignore_eos": True}
STREAMS = 8
"""So many that half of them show that a device has no room for anybody."""


async def follow(http: aiohttp.ClientSession, slow: Path, fault: str) -> tuple[str, int]:
    """How a task ended, and with how many tokens; once it speaks the engine has its ``fault``."""
    async with http.post("/v2/tasks", json=TASK) as response:
        assert response.status == 202
        task = await response.json()
    tokens, kind = 0, ""
    async with http.get(task["events_url"]) as stream:
        async for event in read_events(stream):
            kind = event.event
            tokens += kind == "token"
            if tokens == 3:
                slow.write_text(fault)  # noqa: ASYNC240
    return kind, tokens


@dataclass
class Pair:
    """Two Tritons behind one orchestrator; the device of the one ``dies`` as ``slow`` says."""

    dies: Triton
    orchestrator: Orchestrator
    slow: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    slow = tmp_path_factory.mktemp("device") / "slow"
    dies = Triton(
        engine="synthetic-paced",
        engine_args=f"slow_file={slow}",
        **{"worker.service.failure.STEP_TIMEOUT_S": 2.0},
    )
    well = Triton(engine="synthetic-paced")
    orchestrator = Orchestrator(f"{dies.grpc},{well.grpc}")
    with closing(dies), started(well), running(orchestrator):
        yield Pair(dies, orchestrator, slow)


# Seen from here a device that is full or reports an Xid ends as one that is lost does: all four are
# in tests/worker/service/test_dying_device.py.
@pytest.mark.parametrize("fault", [DeviceFault.LOST, DeviceFault.HANGS])
async def test_or6_streams_of_a_device_that_dies_go_on_elsewhere(
    pair: Pair, fault: DeviceFault
) -> None:
    metric = pair.orchestrator.metric
    retried, ended = metric("tidegate_retries_total"), metric("tidegate_outcomes_total")
    with running(pair.dies):
        await asyncio.to_thread(
            eventually,
            lambda: metric("tidegate_instance_state", state="up") == 2,
            "both instances to be up",
        )
        stub = ProcessId.of(pair.dies.stub_pid)
        assert stub is not None
        said = f"{fault} {stub.pid}"
        async with aiohttp.ClientSession(pair.orchestrator.url) as http:
            ends = await asyncio.gather(*(follow(http, pair.slow, said) for _ in range(STREAMS)))
        assert ends == [("end", 60)] * STREAMS
        assert metric("tidegate_retries_total") > retried
        await asyncio.to_thread(eventually, lambda: not stub.is_running, "its process to end")
        assert metric("tidegate_outcomes_total") == ended + STREAMS
