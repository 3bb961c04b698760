"""``tidegate chat`` before an orchestrator that speaks from a script; Ctrl-C by a real signal."""

import asyncio
import io
import json
import sys
from typing import Any

import pytest

from tests.client.conftest import Cli, Said, in_terminal
from tests.support.fake_orchestrator import HANG, FakeOrchestrator, end, sse, token
from tidegate.cli.runtime import INTERRUPTED

STARTED = sse(1, "started", {})


async def ask(cli: Cli, fake: FakeOrchestrator, *words: str, status: int = 0) -> Said:
    async with fake.serve():
        run: Any = cli
        return await asyncio.to_thread(run, "chat", "--url", fake.base_url, *words, status=status)


async def test_the_answer_of_an_argument_or_of_standard_input(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [STARTED, token(2, "Hello"), token(3, " [b]you"), end(4, 2)]
    fake = FakeOrchestrator(answer, answer)
    assert (await ask(cli, fake, "two", "words", "--deadline-ms", "5000")).out == "Hello [b]you\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert json.loads((await ask(cli, fake, "--json")).out)["text"] == "Hello [b]you"
    questions = [each["messages"][0]["content"] for each in fake.submitted]
    assert questions == ["two words", "two\nlines"]
    assert fake.submitted[0]["deadline_ms"] == 5000
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert "give a question" in cli("chat", status=2).err


async def test_a_failure_ends_the_line_and_says_why(cli: Cli) -> None:
    failed = sse(3, "error", {"code": "deadline_exceeded", "message": "too late by 3 ms"})
    fake = FakeOrchestrator([STARTED, token(2, "Once"), failed])
    said = await ask(cli, fake, "hi", status=1)
    assert said == ("Once\n", "tidegate chat: too late by 3 ms; give it more time\n")


async def test_a_model_cannot_drive_the_terminal(cli: Cli) -> None:
    fake = FakeOrchestrator([STARTED, token(2, "a\x1b[2Jb\x9bc"), end(3, 1)])
    assert (await ask(cli, fake, "hi")).out == "a[2Jbc\n"


async def test_ctrl_c_cancels_the_answer() -> None:
    """WP-2: the server's work too."""
    fake = FakeOrchestrator([STARTED, token(2, "Once"), HANG])
    async with fake.serve():
        command = ("chat", "--url", fake.base_url, "hi")
        status, shown = await in_terminal(*command, until=lambda shown: b"Once" in shown)
    assert (status, fake.cancelled) == (INTERRUPTED, ["t1"]) and b"Traceback" not in shown
