"""The chat loop with scripted input and captured output; Ctrl-C by a real signal."""

import io
import os
import signal

import pytest
from rich.console import Console

from tests.support.fake_orchestrator import HANG, FakeOrchestrator, end, sse, token
from tidegate.cli import chat
from tidegate.client import Client
from tidegate.requests import TaskOptions
from tidegate.results import Token

STARTED = sse(1, "started", {})


async def converse(
    fake: FakeOrchestrator, lines: list[str], status: int = 0, **options: object
) -> str:
    """What the terminal shows for these input lines."""
    output = io.StringIO()
    console = Console(file=output, highlight=False, markup=False, emoji=False, soft_wrap=True)
    async with fake.serve(), Client(fake.base_url) as client:
        read = chat._lines_of(io.StringIO("\n".join(line.rstrip("\n") for line in lines)))
        session = chat.ChatView(client, console, read, TaskOptions(**options))  # type: ignore[typeddict-item]
        assert await session.run() == status
    return output.getvalue()


async def test_turns_are_streamed_and_remembered() -> None:
    fake = FakeOrchestrator(
        [STARTED, token(2, "Hello"), token(3, " [b]you"), end(4, 2)],
        [STARTED, token(2, "Bye"), end(3, 1)],
    )
    shown = await converse(fake, ["hi\n", "\n", "again\n"], deadline=5000)
    assert "Hello [b]you" in shown
    assert "2 tokens · 200 tokens/s" in shown  # by the service's 5 ms, not when they came
    assert "of the deadline left" in shown
    assert [turn["role"] for turn in fake.submitted[1]["messages"]] == ["user", "assistant", "user"]
    assert fake.submitted[1]["messages"][1]["content"] == "Hello [b]you"


async def test_a_command_is_never_sent_to_the_model() -> None:
    fake = FakeOrchestrator(*[[STARTED, token(2, "x"), end(3, 1)] for _ in range(2)])
    lines = ["/help", "/quit now", "//etc/hosts", "/new", "two", "/exit", "three"]
    shown = await converse(fake, lines)
    assert "start over" in shown and "There is no /quit; /help" in shown
    assert [[turn["content"] for turn in each["messages"]] for each in fake.submitted] == [
        ["/etc/hosts"],
        ["two"],
    ]


async def test_one_question_gets_its_answer_and_a_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = sse(2, "error", {"code": "deadline_exceeded", "message": "too late by 3 ms"})
    fake = FakeOrchestrator([STARTED, token(2, "Hello"), end(3, 1)], [STARTED, failed])
    async with fake.serve():
        assert await chat.run(fake.base_url, {}, read=chat._lines_of(io.StringIO("hi"))) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("Hello") and "Ctrl-C" not in shown
        assert await chat.run(fake.base_url, {}, read=chat._lines_of(io.StringIO("hi"))) == 1


async def test_errors_are_shown_and_the_session_goes_on() -> None:
    failed = sse(2, "error", {"code": "deadline_exceeded", "message": "too late by 3 ms"})
    fake = FakeOrchestrator([STARTED, failed], [STARTED, token(2, "fine"), end(3, 1)])
    shown = await converse(fake, ["one", "two"])
    assert "too late by 3 ms" in shown
    assert "fine" in shown
    assert fake.submitted[1]["messages"] == [{"role": "user", "content": "two"}]


async def test_the_oldest_turn_makes_room_in_the_context() -> None:
    overflow = sse(2, "error", {"code": "context_overflow", "message": "too long"})
    ok = [STARTED, token(2, "x"), end(3, 1)]
    fake = FakeOrchestrator(ok, [overflow], ok)
    shown = await converse(fake, ["one", "two"])
    assert "forgetting the oldest turn" in shown
    assert fake.submitted[2]["messages"] == [{"role": "user", "content": "two"}]


async def test_a_model_cannot_drive_the_terminal() -> None:
    fake = FakeOrchestrator([STARTED, token(2, "a\x1b[2Jb\x9bc"), end(3, 1)])
    shown = await converse(fake, ["hi"])
    assert "a[2Jbc" in shown


class InterruptingChat(chat.ChatView):
    """Presses Ctrl-C when the first token is on the screen."""

    presses = 1

    async def _show(self, answer: chat.Answer) -> None:
        add = answer.add

        def add_then_interrupt(event: Token, now: float) -> None:
            add(event, now)
            for _ in range(self.presses):
                os.kill(os.getpid(), signal.SIGINT)

        answer.add = add_then_interrupt  # type: ignore[method-assign]
        await super()._show(answer)


@pytest.mark.parametrize(("presses", "turns"), [(1, 2), (2, 1)])
async def test_ctrl_c_cancels_the_answer_and_twice_leaves(
    monkeypatch: pytest.MonkeyPatch, presses: int, turns: int
) -> None:
    """WP-2: the server's work is cancelled too."""
    monkeypatch.setattr(InterruptingChat, "presses", presses)
    monkeypatch.setattr(chat, "ChatView", InterruptingChat)
    before = signal.getsignal(signal.SIGINT)
    fake = FakeOrchestrator(*[[STARTED, token(2, "Once"), HANG] for _ in range(2)])
    shown = await converse(fake, ["one", "two"], status=0 if presses == 1 else 130)
    assert fake.cancelled == ["t1"] * turns
    assert shown.count("Once") == turns
    assert ("cancelled" in shown) == (presses == 1)
    assert signal.getsignal(signal.SIGINT) is before


async def test_unknown_model_names_those_served(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOrchestrator().serve() as fake:
        assert await chat.run(fake.base_url, {"model": "other"}) == 1
    assert "demo" in capsys.readouterr().err
