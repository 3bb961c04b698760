"""docs/client.md and docs/cli.md: their programs run, and their commands are there."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from tests.orchestrator.conftest import Service
from tidegate.cli.commands import tidegate

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = re.findall(r"```python\n(.*?)```", (DOCS / "client.md").read_text(), re.S)
CLI = (DOCS / "cli.md").read_text()
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", CLI, re.S)).splitlines()


async def test_programs_of_the_client(service: Service, capsys: Any) -> None:
    assert len(PROGRAMS) == 3
    for program in PROGRAMS:
        # In a thread: a program of its own would import everything once more.
        code = compile(program.replace("http://127.0.0.1:8080", service.url), "client.md", "exec")
        await asyncio.to_thread(exec, code, {})
        assert "w0 w1 w2" in capsys.readouterr().out
    assert set(service.outcomes()) == {"met"}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str) -> None:
    program, *words = shlex.split(line)
    assert program == "tidegate"
    command: click.Command = tidegate
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)  # raises for what it does not know


def test_every_command_is_in_the_table() -> None:
    table = "".join(line for line in CLI.splitlines() if line.startswith("| `"))
    assert all(f"`tidegate {name}" in table for name in tidegate.commands)
