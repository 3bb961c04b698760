"""Every command and program in the README works as it stands, but for its ports and for its five
seconds, which a busy machine may take for other things."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

CHECKOUT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", (CHECKOUT / "README.md").read_text(), re.S)
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [text for kind, text in BLOCKS if kind == "sh"]
CURLS = [text for text in COMMANDS if text.startswith("curl")]
MAKES = [line for text in COMMANDS for line in text.splitlines() if line.startswith("make ")]


def on_ports_of(demo: Stack, text: str) -> str:
    assert "127.0.0.1:80" in text, "the README's programs talk to the ports of the demo"
    changes = {
        "http://127.0.0.1:8080": demo.url,
        "127.0.0.1:8001": demo.triton.grpc,
        '"deadline_ms": 5000': '"deadline_ms": 50000',
        "X-Timeout-Ms: 5000": "X-Timeout-Ms: 50000",
    }
    for theirs, ours in changes.items():
        text = text.replace(theirs, ours)
    return text


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(demo: Stack, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", on_ports_of(demo, program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10, done.stdout
    assert not done.stderr


@pytest.mark.parametrize("command", CURLS)
def test_curls(demo: Stack, command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", on_ports_of(demo, command)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "token" in done.stdout or "data: [DONE]" in done.stdout, done.stdout


@pytest.mark.parametrize("command", MAKES)
def test_make_targets_exist(command: str) -> None:
    """What they do is tested elsewhere; here, that make knows them as the README has them."""
    done = subprocess.run(
        ["bash", "-c", command.partition("#")[0].replace("make ", "make --dry-run ", 1)],
        cwd=CHECKOUT,
        env=os.environ | {"MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_has_what_this_tests() -> None:
    assert len(PROGRAMS) >= 2 and len(CURLS) >= 1
    assert {"make demo", "make test"} <= {line.partition("#")[0].strip() for line in MAKES}
