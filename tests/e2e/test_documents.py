"""Every fenced block of the pages in Python or shell is run or parsed.

Run, but for its ports and for seconds that a busy machine may take for other things: what is a
whole program, calls the service by curl, or begins as one of ``AGAINST_THE_DEMO`` does. Parsed, by
the command that it calls or by a dry run of make: every other command of ``tidegate`` and make.
Neither: what is in ``NOT_RUN``, with the reason (another machine, a hub, Docker).
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from tests.e2e.conftest import Stack
from tests.support.cases import for_each
from tests.support.stack import Orchestrator, Triton, running
from tidegate.cli.commands import tidegate

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [
    *(CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(CHECKOUT.glob("docs/*.md")),
    *(CHECKOUT / name / "README.md" for name in ("docker", "orchestrator", "perf", "worker")),
]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    kind: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its commands, without comments; one that continues in the next line is one."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return [line for line in joined.splitlines() if line and not line.startswith("#")]

    @property
    def is_run(self) -> bool:
        """Whether it is a whole program that needs no other package (tests/e2e/clients runs
        those), or calls the service by curl."""
        others = ("from agents import", "from langgraph.")
        return (self.kind == "python" and not any(one in self.text for one in others)) or (
            self.kind == "sh" and "curl " in self.text and "docker " not in self.text
        )


BLOCKS = [
    Block(str(page.relative_to(CHECKOUT)), *found)
    for page in PAGES
    for found in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.S)
]
RUN = [block for block in BLOCKS if block.is_run]
COMMANDS = [
    (block.page, line.partition(" #")[0].strip().removeprefix(".venv/bin/"))
    for block in BLOCKS
    if block.kind == "sh" and not block.is_run
    for line in block.lines
]
AGAINST_THE_DEMO = (
    "tidegate tasks list",
    "tidegate chat",
    "tidegate doctor",
)
"""Commands that need nothing but a service; each begins so."""
OF_THE_DEMO = sorted({command for _, command in COMMANDS if command.startswith(AGAINST_THE_DEMO)})
NOT_RUN = {
    "export LANE_TOKEN": "for the compose file below it",
    "export TIDEGATE_STATE__URL": "needs a Redis; tests/orchestrator/state starts one",
    "MODEL=~/models/Qwen3-0.6B": "needs a Docker engine",
    "ADMIN_TOKEN=choose-another docker": "needs a Docker engine",
    "docker ": "needs a Docker engine",
    "kubectl ": "needs a cluster; tests/docker renders what it is given",
    "curl -N http://127.0.0.1:8080/v1/completions": "to what the compose file serves",
    "prometheus ": "Prometheus is not installed; tests/observability reads its files",
    "pip install ": "changes the environment that runs this",
    "nvidia-smi ": "needs an NVIDIA driver",
    "sudo nvidia-ctk ": "sets up a Docker engine",
    "python -m perf.engine.gpu ": "needs a GPU; tests/perf/test_gpu.py runs it on toy sizes",
    "python -m pytest -m cuda ": "needs a GPU",
    "python -m tools.conformance": "loads a server for minutes; tests/tools tests it",
    "deadline-conformance ": "the same, from the wheel of its own",
    "python client/examples/slot_grpc.py": "needs a model of clips; tests/e2e/test_slot.py runs it",
}
"""What nothing here runs or parses, by how it begins, and why."""


def test_the_pages_have_what_this_tests() -> None:
    assert [block.page for block in RUN if block.kind == "python"].count("docs/clients.md") >= 2
    assert {("README.md", "make demo"), ("README.md", "make test")} <= {*COMMANDS}
    assert len(RUN) >= 10


def here(text: str, url: str, grpc: str) -> str:
    """``text`` as it is for a service at ``url``."""
    assert re.search(r"(?:localhost|127\.0\.0\.1):80\d\d", text), "it talks to the demo's ports"
    changes = {
        r"http://127\.0\.0\.1:8080": url,
        r"localhost:8080": url.removeprefix("http://"),
        r"127\.0\.0\.1:8001": grpc,
        r'("deadline_ms": )\d+': r"\g<1>50000",
        r"X-Timeout-Ms: \d+": "X-Timeout-Ms: 50000",
        r"deadline\((\d+)\)": r"deadline(\g<1>0)",
    }
    for theirs, ours in changes.items():
        text = re.sub(theirs, ours, text)
    return text


def environment(url: str) -> dict[str, str]:
    """``TIDEGATE_PORT`` is for the doctor, who looks whether the port is free."""
    client = {"TIDEGATE_URL": url, "PYTHONPATH": str(CHECKOUT / "client")}
    return os.environ | client | {"TIDEGATE_PORT": "0"}


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What a command says that ends well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def with_a_journal(demo: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestrator]:
    journal = tmp_path_factory.mktemp("journal") / "journal.db"
    orchestrator = Orchestrator(demo.triton.grpc, journal__path=journal)
    with running(orchestrator):
        yield orchestrator


@pytest.fixture(scope="module")
def with_slots(slots: Triton) -> Iterator[Orchestrator]:
    orchestrator = Orchestrator(slots.grpc, slots__serve=True)
    with running(orchestrator):
        yield orchestrator


def _url_for(block: Block, request: pytest.FixtureRequest) -> str:
    """Of a service that has what the block asks for."""
    if "slots" in block.text:
        return str(request.getfixturevalue("with_slots").url)
    if '"durable": true' in block.text or "client.batches" in block.text:
        return str(request.getfixturevalue("with_a_journal").url)
    return str(request.getfixturevalue("demo").url)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=[f"{b.page}-{b.kind}" for b in RUN])
def test_programs_and_curls_do_what_they_say(
    block: Block, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = _url_for(block, request)
    grpc = request.getfixturevalue("demo").triton.grpc if "8001" in block.text else ""
    text = here(block.text, url, grpc)
    command = [sys.executable, "-c", text] if block.kind == "python" else ["bash", "-ec", text]
    done = run(command, cwd=tmp_path, env=environment(url))
    assert "error" not in done.stdout, done.stdout
    if block.kind == "python":
        assert not done.stderr
        assert len(done.stdout.split()) >= 2, done.stdout
    else:
        assert re.search(r"data: |curve\"|_id\"", done.stdout), done.stdout


@pytest.mark.parametrize("command", OF_THE_DEMO)
def test_commands_run_as_the_pages_have_them(demo: Stack, command: str) -> None:
    words = f"{sys.executable} -m tidegate {command.removeprefix('tidegate')}"
    run(["bash", "-c", words], env=environment(demo.url), input="Hello.\n")


@for_each(("page", "command"), COMMANDS)
def test_commands_are_known_as_the_pages_have_them(page: str, command: str) -> None:
    if command.startswith((*NOT_RUN, *AGAINST_THE_DEMO)):
        return
    if command.startswith("make "):
        _is_known_to_make(command)
    elif "tidegate " in command:
        _is_known_to_the_command(shlex.split(command.partition("tidegate ")[2]))
    else:
        pytest.fail(f"{page} has a command that nothing tests: {command}")


@cache
def _is_known_to_make(command: str) -> None:
    """What a target does is tested elsewhere."""
    words = command.replace("make ", "make --dry-run ", 1)
    run(["bash", "-c", words], cwd=CHECKOUT, env=os.environ | {"MAKEFLAGS": ""})


def _is_known_to_the_command(arguments: list[str]) -> None:
    """Raises ``click.UsageError`` for a command or an option that there is not."""
    command: click.Command = tidegate
    context, name = None, "tidegate"
    while isinstance(command, click.Group):
        context = command.make_context(name, arguments, parent=context)
        if not (context._protected_args or context.args):
            return  # the group says what it does without a command
        name, found, arguments = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert found is not None and name is not None
        command = found
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            parameter.type.exists = False  # the pages' files are nowhere
    command.make_context(name, arguments, parent=context)


def test_every_command_is_in_the_table() -> None:
    lines = (CHECKOUT / "docs/cli.md").read_text().splitlines()
    table = "".join(line for line in lines if line.startswith("| `"))
    assert all(f"`tidegate {name}" in table for name in tidegate.commands)
