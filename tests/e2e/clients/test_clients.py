"""Other people's clients, unmodified, on the real Triton and the demo model (OR-3).

``make test-clients`` installs them and runs this; elsewhere it is skipped: with their imports it
takes a minute. Each is a program of its own, so that what it imports is what its users import.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.clients.conftest import Report
from tests.e2e.clients.programs import (
    CLIENTS,
    HERE,
    NODE_MODULES,
    THEIRS,
    Client,
    NodeProgram,
    Program,
)
from tests.e2e.conftest import Stack
from tests.support.stack import Orchestrator, running

MAX_S = 110

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not THEIRS.exists(), reason="make test-clients installs other clients"),
]


@pytest.fixture(scope="module")
def url(demo: Stack) -> Iterator[str]:
    """The demo model behind an orchestrator that takes an SDK's timeout for a deadline."""
    orchestrator = Orchestrator(demo.triton.grpc)
    with running(orchestrator):
        yield orchestrator.url
        demo.assert_idle()


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_clients(url: str, client: Client, shown: Report) -> None:
    commands = [command_of(program) for program in client.programs]
    versions = [" and ".join(p.versions()) for p in client.programs]
    shown(client.name, client.shows, ", ".join(dict.fromkeys(versions)))
    for command in commands:
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=MAX_S)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr


def command_of(program: Program | NodeProgram) -> list[str]:
    if isinstance(program, Program):
        return [str(program.interpreter), str(HERE / program.file)]
    node = shutil.which("node")
    if node is None or not NODE_MODULES.exists():
        pytest.skip("make test-clients installs it where there is node")
    return [node, str(HERE / program.file)]


def test_curl(url: str, shown: Report) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    told = subprocess.run([curl, "--version"], capture_output=True, text=True, check=True)
    shown("`curl`", "Responses, streamed and not", told.stdout.split()[1])
    body = json.dumps({"model": "demo", "input": "Tell me a story.", "max_output_tokens": 8})
    command = [curl, "-sN", f"{url}/v1/responses", "-H", "Content-Type: application/json", "-d"]
    whole = subprocess.run([*command, body], capture_output=True, check=True, timeout=MAX_S)
    assert json.loads(whole.stdout)["usage"]["output_tokens"] == 8
    body = json.dumps(json.loads(body) | {"stream": True})
    events = subprocess.run([*command, body], capture_output=True, check=True, timeout=MAX_S)
    lines = events.stdout.decode().splitlines()
    assert lines[0] == "event: response.created" and "event: response.incomplete" in lines
