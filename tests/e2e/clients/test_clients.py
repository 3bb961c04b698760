"""Other people's clients, unmodified, on the real Triton and the demo model (OR-3).

``make test-clients`` installs them and runs this; elsewhere it is skipped: with their imports it
takes a minute. Each is a program of its own, so that what it imports is what its users import.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.paths import state_dir
from tests.e2e.conftest import Stack
from tests.support.stack import Orchestrator

HERE = Path(__file__).parent
OURS = Path(sys.executable)
THEIRS = state_dir() / "clients" / "bin" / "python"
"""With the packages of requirements.txt."""
MAX_S = 110

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not THEIRS.exists(), reason="make test-clients installs other clients"),
]


@pytest.fixture(scope="module")
def url(demo: Stack) -> Iterator[str]:
    """The demo model behind an orchestrator that takes an SDK's timeout for a deadline."""
    orchestrator = Orchestrator(demo.triton.grpc, deadlines__sdk_timeouts=True)
    orchestrator.start()
    try:
        yield orchestrator.url
        demo.assert_idle()
    finally:
        assert orchestrator.stop() == 0


def show(*command: object) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=MAX_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_the_official_sdks(url: str, name: str) -> None:
    show(OURS, HERE / f"with_{name}.py", url)


@pytest.mark.parametrize(
    "name", ["openai", "anthropic", "litellm", "langchain", "pydantic_ai", "instructor", "agents"]
)
def test_clients_of_others(url: str, name: str) -> None:
    show(THEIRS, HERE / f"with_{name}.py", url)


@pytest.mark.parametrize("name", ["openai", "ai"])
def test_javascript(url: str, name: str) -> None:
    node = shutil.which("node")
    if node is None or not (HERE / "node_modules").exists():
        pytest.skip("make test-clients installs it where there is node")
    show(node, HERE / f"with_{name}.mjs", url)


def test_curl(url: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    body = json.dumps({"model": "demo", "input": "Tell me a story.", "max_output_tokens": 8})
    command = [curl, "-sN", f"{url}/v1/responses", "-H", "Content-Type: application/json", "-d"]
    whole = subprocess.run([*command, body], capture_output=True, check=True, timeout=MAX_S)
    assert json.loads(whole.stdout)["usage"]["output_tokens"] == 8
    body = json.dumps(json.loads(body) | {"stream": True})
    events = subprocess.run([*command, body], capture_output=True, check=True, timeout=MAX_S)
    lines = events.stdout.decode().splitlines()
    assert lines[0] == "event: response.created" and "event: response.incomplete" in lines
