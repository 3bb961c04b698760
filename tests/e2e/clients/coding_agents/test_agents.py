"""Coding agents, unmodified, each of which changes a file with its own tools.

The real Triton has the scripted model with ``script.toml``: its second and third answers come only
to what the agent's tools said, so a file that has changed shows the whole loop of tools.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients.coding_agents import recordings
from tests.e2e.clients.coding_agents.agents import AGENTS, MODEL, Agent, environment
from tests.e2e.clients.conftest import Report
from tests.e2e.conftest import Stack, stack_of
from tests.support.recording_proxy import RecordingProxy
from tests.support.stack import Triton

MAX_S = 240
RECORD = bool(os.environ.get("RECORD"))
"""Whether to write what the agents send into the test data of ``test_odd_requests.py``."""

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(MAX_S + 60)]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Stack]:
    """The scripted model, under every name that an agent insists on."""
    script = Path(__file__).with_name("script.toml")
    triton = Triton(engine="synthetic-scripted", engine_args=f"script={script}", model_name=MODEL)
    yield from stack_of(triton, models__aliases=f"claude-*={MODEL}")


@pytest.mark.parametrize("agent", AGENTS, ids=[agent.name for agent in AGENTS])
def test_an_agent_changes_a_file(
    agent: Agent, scripted: Stack, shown: Report, tmp_path: Path
) -> None:
    if not agent.command.exists():
        pytest.skip("make test-clients installs agents")
    home, work = tmp_path / "home", tmp_path / agent.key
    work.mkdir()
    (home / "tmp").mkdir(parents=True)
    version = _version(agent, tmp_path / "version")
    shown(agent.name, agent.shows, version)
    file = work / "settings.ini"
    file.write_text(f"file: {file}\ncolour = red\n")
    with RecordingProxy(scripted.url) as proxy:
        run = agent.run(home, proxy.url, f"Make the colour in {file} blue.", file)
        said = _run([agent.command, *run.words], environment(home, run.env), work)
    assert "colour = blue" in file.read_text(), said
    assert "The colour is blue now." in said
    refused = [(one.path, one.status) for one in proxy.exchanges if one.status >= 300]
    assert not refused, said
    if RECORD:
        print(recordings.write(agent.key, version, proxy.exchanges, home))
    scripted.assert_idle()


def _version(agent: Agent, home: Path) -> str:
    home.mkdir()
    told = _run([agent.command, "--version"], environment(home, {}), home)
    found = re.search(r"\d+\.\d+\.\d+", told)
    assert found is not None, told
    return found[0]


def _run(words: list[object], env: dict[str, str], folder: Path) -> str:
    """What a command says; nothing that it has started in its process group outlives it."""
    process = subprocess.Popen(
        [str(word) for word in words],
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=MAX_S)
    finally:
        _kill(process.pid)
    assert process.returncode == 0, said
    return said


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
