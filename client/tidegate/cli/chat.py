"""``tidegate chat``: a conversation in the terminal, streamed as it is generated.

Ctrl-C during an answer cancels it, on the server too. Ctrl-C at the prompt quits; so does the end
of input. Each line of piped input is one turn.
"""

import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, TextIO, cast

import click

from tidegate.cli.arguments import POSITIVE, Command, option, server_options
from tidegate.cli.runtime import INTERRUPTED, importing
from tidegate.cli.terminal import CONTROL_CHARACTERS
from tidegate.errors import ApiError, ConnectFailed, TidegateError

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console

    from tidegate.client import Client
    from tidegate.deadlines import Deadline
    from tidegate.requests import Message, TaskOptions
    from tidegate.results import End, Token

DESCRIPTION = """\
Talk to a model; the answer appears as it is generated.

  tidegate chat
  tidegate chat "Tell me a story."                   one question and its answer
  tidegate chat --url http://127.0.0.1:9000 --deadline-ms 2000
"""

ReadLine = Callable[[], str]
"""Reads the next line. Raises ``EOFError`` when there is none, ``KeyboardInterrupt`` on Ctrl-C."""

GREETING = "Ctrl-C stops an answer, twice quits; /new starts over, /help says more."
HELP = """\
/new   forget what was said, and start over
/help  this
/exit  quit, as Ctrl-D does
Any other line goes to the model. A line that begins with two slashes goes without the first."""


@click.command(cls=Command, help=DESCRIPTION, short_help="talk to a model")
@server_options
@option("--model", help="a served model (default: the only one)")
@option("--deadline-ms", "deadline", type=POSITIVE, help="deadline of every answer")
@option("--first-token-ms", "first_token", type=POSITIVE, help="deadline of its first token")
@option("--token-gap-ms", "token_gap", type=POSITIVE, help="longest gap between tokens")
@click.argument("question", nargs=-1)
def chat(url: str, token: str | None, question: tuple[str, ...], **given: object) -> int:
    with importing():
        import asyncio

        import tidegate.client  # noqa: F401 - which `run` needs
    read = _lines_of(StringIO(" ".join(question))) if question else None
    stated = {name: value for name, value in given.items() if value is not None}
    stated["temperature"] = 0.4  # small models babble at 1
    try:
        return asyncio.run(run(url, cast("TaskOptions", stated), token, read))
    except ValueError as error:  # an invalid URL
        raise click.ClickException(f"{error}; see --url") from error


async def run(
    base_url: str, options: "TaskOptions", token: str | None = None, read: ReadLine | None = None
) -> int:
    """Chat until the input (by default, the terminal) ends. Returns 0, or 1 if the server cannot be
    used or did not answer the last question."""
    from rich.console import Console

    from tidegate.client import Client
    from tidegate.transport import NO_RETRIES

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    # An interactive user sees the error and can retry.
    async with Client(base_url, token=token, retries=NO_RETRIES) as client:
        try:
            models = await client.models()
        except ConnectFailed as error:
            return _failed(
                f"{error}; start a server with `tidegate up`, or give another address with --url"
            )
        except TidegateError as error:
            return _failed(f"{base_url} cannot be used: {error}")
        if not models:
            return _failed(f"{base_url} serves no model yet; try again in a moment")
        chosen = options.setdefault("model", models[0])
        if chosen not in models:
            return _failed(f"no model {chosen!r} at {base_url}; served: {', '.join(models)}")
        if read is None:
            console.print(f"{chosen} at {base_url}. {GREETING}", style="dim")
        return await ChatView(client, console, read or _line_reader(), options).run()


def _failed(why: str) -> int:
    print(f"tidegate chat: {why}", file=sys.stderr)
    return 1


@dataclass
class Answer:
    """One answer as it grows, with the numbers for the status line below it. Times are seconds."""

    asked_at: float
    text: str = ""
    tokens: int = 0
    first_at: float | None = None
    end: "End | None" = None

    def add(self, token: "Token", now: float) -> None:
        self.text += token.text
        self.tokens += len(token.token_ids)
        self.first_at = self.first_at or now

    def summary(self, deadline: "Deadline | None", now: float) -> str:
        """One line: tokens, rate, time to first token, and time left of the deadline."""
        from tidegate.deadlines import to_seconds

        parts, end = [f"{self.tokens} tokens"], self.end
        # The service's time: tokens that arrive in one piece look infinitely fast here.
        if self.tokens > 1 and end and end.budget and end.budget.decode_ms:
            parts.append(f"{1000 * (self.tokens - 1) / end.budget.decode_ms:.0f} tokens/s")
        if self.first_at is not None:
            parts.append(f"first after {(self.first_at - self.asked_at) * 1000:.0f} ms")
        if deadline is not None:
            left_s = to_seconds(deadline) - (now - self.asked_at)
            parts.append(f"{left_s:.1f} s of the deadline left")
        if end and end.finish_reason not in (None, "stop"):
            parts.append(f"ended by {end.finish_reason}")
        if end and end.missed_part is not None:
            parts.append(f"{end.missed_part.replace('_', ' ')} too late")
        return " · ".join(parts)


class ChatView:
    """A conversation: holds its turns so far, and runs the next one."""

    def __init__(
        self, client: "Client", console: "Console", read: ReadLine, options: "TaskOptions"
    ) -> None:
        self._client = client
        self._console = console
        self._read = read
        self._options = options
        self._turns: list[Message] = []
        self._status = 0

    async def run(self) -> int:
        """Answer turns until the input ends; returns 1 if the last one failed, otherwise 0."""
        try:
            while True:
                # Deliberately blocks the loop: nothing else runs between two turns, and Ctrl-C can
                # interrupt line editing only in the main thread.
                line = self._read().strip()
                if line == "/exit":
                    raise EOFError
                if line == "/new":
                    self._turns.clear()
                    self._say("A new conversation.")
                elif line == "/help":
                    self._say(HELP)
                elif line.startswith("/") and not line.startswith("//"):
                    self._say(f"There is no {line.split()[0]}; /help lists the commands.")
                elif line:
                    await self._turn(line.removeprefix("/"))
        except EOFError:
            self._console.print()
            return self._status
        except (KeyboardInterrupt, _Leave):
            self._console.print()
            return INTERRUPTED

    async def _turn(self, line: str) -> None:
        self._turns.append({"role": "user", "content": line})
        answer = await self._answer()
        self._status = 1 if answer is None else 0
        if answer is None or answer.first_at is None:
            self._turns.pop()
        else:
            self._turns.append({"role": "assistant", "content": answer.text})

    async def _answer(self) -> Answer | None:
        """Stream one answer, which Ctrl-C cuts short. Returns None if it failed."""
        while True:
            answer = Answer(asked_at=time.monotonic())
            try:
                async with _ended_by_ctrl_c() as ctrl_c:
                    await self._show(answer)
            except TidegateError as error:
                is_overflow = isinstance(error, ApiError) and error.code == "context_overflow"
                if is_overflow and len(self._turns) > 1:
                    del self._turns[:2]  # the oldest question and its answer
                    self._say("(forgetting the oldest turn to make room)")
                    continue
                self._console.print(f"\n{error}" if answer.first_at else str(error), style="red")
                return None
            summary = answer.summary(self._options.get("deadline"), time.monotonic())
            self._console.print()
            self._say(f"cancelled · {summary}" if ctrl_c.is_set() else summary)
            return answer

    async def _show(self, answer: Answer) -> None:
        from tidegate.results import End, Token

        async with aclosing(self._client.stream(self._turns, **self._options)) as events:
            async for event in events:
                if isinstance(event, Token):
                    answer.add(event, time.monotonic())
                    self._console.print(event.text.translate(CONTROL_CHARACTERS), end="")
                elif isinstance(event, End):
                    answer.end = event

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")


class _Leave(Exception):
    """Ctrl-C came twice during one answer."""


@asynccontextmanager
async def _ended_by_ctrl_c() -> "AsyncIterator[asyncio.Event]":
    """Run the body so that Ctrl-C ends only the body. The event is set if it did.

    A second Ctrl-C does not interrupt the cancel that the first one started, because the server
    must receive it. ``_Leave`` is raised after that.
    """
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    pressed, again = asyncio.Event(), asyncio.Event()

    def press() -> None:
        if pressed.is_set():
            again.set()
        else:
            pressed.set()
            task.cancel()

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, press)
    try:
        yield pressed
    except asyncio.CancelledError:
        if not pressed.is_set() or task.uncancel() > 0:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
    if again.is_set():
        raise _Leave


def _line_reader() -> ReadLine:
    """Reader of lines from the terminal, with editing and history, or from a pipe, without."""
    read = _lines_of(sys.stdin)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - importing it gives input() its line editing
        read = partial(input, "\n> ")

    def line() -> str:
        # Ctrl-C must raise at once; asyncio's handler would wait for the loop.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return read()
        finally:
            signal.signal(signal.SIGINT, before)

    return line


def _lines_of(text: TextIO) -> ReadLine:
    """Read ``text`` line by line."""

    def read() -> str:
        if line := text.readline():
            return line
        raise EOFError

    return read
