"""Client library, chat command and ``tritonclient`` examples against the real thing."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Stack
from tests.support.processes import python

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shown"), [((), ""), (("--cancel-after", "8"), "[cancelled after 8 responses]")]
)
def test_an_example_runs_with_tritonclient_alone(
    demo: Stack, options: tuple[str, ...], shown: str
) -> None:
    """WK-1: the plain contract, from a script that imports nothing of ours."""
    example = EXAMPLES / "stream_grpc.py"
    source = example.read_text()
    assert not any(f"import {ours}" in source for ours in ("tidegate", "worker", "orchestrator"))
    output = python(example, "Once upon a time", "--url", demo.triton.grpc, *options).stdout
    assert shown in output
    assert len(output.split()) > 8


@pytest.mark.slow
def test_an_agent_keeps_one_promise_over_four_calls(demo: Stack) -> None:
    """As it stands, but for its ten seconds, which a busy machine may take for other things."""
    agent = EXAMPLES / "agent_chain.py"
    output = python(agent, "a small fox", "--url", demo.url, "--seconds", 50).stdout
    assert [f"call {number} of 4" in output for number in range(1, 5)] == [True] * 4
    assert output.splitlines()[-1] == "kept"
