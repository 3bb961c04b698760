"""Client library, chat command and ``tritonclient`` examples against the real thing."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"
LIMIT_S = 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shown"), [((), ""), (("--cancel-after", "8"), "[cancelled after 8 responses]")]
)
async def test_an_example_runs_with_tritonclient_alone(
    demo: Stack, options: tuple[str, ...], shown: str
) -> None:
    """WK-1: the plain contract, from a script that imports nothing of ours."""
    example = EXAMPLES / "stream_grpc.py"
    source = example.read_text()
    assert not any(f"import {ours}" in source for ours in ("tidegate", "worker", "orchestrator"))
    output = await script(
        [sys.executable, str(example), "Once upon a time", "--url", demo.triton.grpc, *options]
    )
    assert shown in output
    assert len(output.split()) > 8


@pytest.mark.slow
async def test_an_agent_keeps_one_promise_over_four_calls(demo: Stack) -> None:
    """As it stands, but for its ten seconds, which a busy machine may take for other things."""
    agent = str(EXAMPLES / "agent_chain.py")
    output = await script(
        [sys.executable, agent, "a small fox", "--url", demo.url, "--seconds", "50"]
    )
    assert [f"call {number} of 4" in output for number in range(1, 5)] == [True] * 4
    assert output.splitlines()[-1] == "kept"


async def script(command: list[str], piped: str = "") -> str:
    """What a command prints; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"COLUMNS": "200"},
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate(piped.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()
