"""A device that dies in every way, a step that never ends among them: its worker's process ends,
its streams go on elsewhere (OR-6, OR-11)."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from pool.process.proc import ProcessId
from tests.support.sse import read_events
from tests.support.stack import Orchestrator, Triton, eventually, running
from worker.runner.simulated_device import DeviceFault

pytestmark = pytest.mark.e2e

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
            kind = event.kind
            tokens += kind == "token"
            if tokens == 3:
                slow.write_text(fault)  # noqa: ASYNC240
    return kind, tokens


@pytest.mark.parametrize("fault", list(DeviceFault))
async def test_or6_streams_of_a_device_that_dies_go_on_elsewhere(
    tmp_path: Path, fault: DeviceFault
) -> None:
    slow = tmp_path / "slow"
    dies = Triton(engine="synthetic-paced", synthetic__slow_file=slow, step_timeout_s=2)
    well = Triton(engine="synthetic-paced")
    try:
        for triton in (dies, well):
            triton.start()
        orchestrator = Orchestrator(f"{dies.grpc},{well.grpc}")
        with running(orchestrator):
            eventually(
                lambda: orchestrator.metric("tidegate_instance_state", state="up") == 2,
                "both instances to be up",
            )
            stub = ProcessId.of(dies.stub_pid)
            assert stub is not None
            said = f"{fault} {stub.pid}"
            async with aiohttp.ClientSession(orchestrator.url) as http:
                ends = await asyncio.gather(*(follow(http, slow, said) for _ in range(STREAMS)))
            assert ends == [("end", 60)] * STREAMS
            assert orchestrator.metric("tidegate_retries_total") > 0
            eventually(lambda: not stub.is_running, "its process to end")
            assert orchestrator.metric("tidegate_outcomes_total") == STREAMS
    finally:
        dies.close()
        well.close()
