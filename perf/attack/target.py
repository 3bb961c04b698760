"""Targets of attacks, and the tally of their tries."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from perf.load.connection import CONTENT_LENGTH
from protocol import Code

SECRET = "sk-planted-4711"
"""Secret in every prompt and every key that an attack sends: no log and no error may have it."""

_CODES = frozenset(code.value for code in Code) | {"context_length_exceeded"}  # OpenAI's own
_SERVER_ERRORS = (503, 504)
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Target:
    """A running stack. ``pids`` are by part; ``logs`` are searched after each attack.

    ``health_port`` is 0 where health checks have no port of their own.
    """

    host: str
    port: int
    triton_http_port: int
    triton_grpc: str
    model: str
    pids: dict[str, int]
    logs: tuple[Path, ...]
    health_port: int = 0


@dataclass(slots=True)
class Tally:
    """Counts of tries by outcome, and of what must not have happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def tries(self) -> int:
        return sum(self.outcomes.values())

    def add(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def fault(self, what: str) -> None:
        """Note something that must not happen; a few are kept as examples."""
        if len(self.faults) < _EXAMPLES and what not in self.faults:
            self.faults.append(what[:500])

    def answer(self, raw: bytes, sent: object) -> None:
        """Count an HTTP answer as read off the wire; ``sent`` is for the example of a fault."""
        head, _, body = raw.partition(b"\r\n\r\n")
        length = CONTENT_LENGTH.search(head)
        if length is not None and len(body) > int(length[1]):  # what was sent was two requests
            body, rest = body[: int(length[1])], body[int(length[1]) :]
            self.answer(rest, sent)
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            self.add("no answer" if not raw else "garbage")
            if raw:
                self.fault(f"not HTTP: {raw[:100]!r} to {sent!r}")
            return
        status = int(words[1])
        if status < 400:
            self.add(str(status))
            return
        if not body and isinstance(sent, bytes) and sent.startswith(b"HEAD "):
            self.add(str(status))  # such an answer has none
            return
        code = _code_of(body)
        self.add(f"{status} {code}")
        if code not in _CODES:
            self.fault(f"{status} not in our shape: {raw[:300]!r} to {sent!r}")
        if status >= 500 and status not in _SERVER_ERRORS:
            self.fault(f"{status} {code} to {sent!r}")
        if SECRET.encode() in raw:
            self.fault(f"the secret is echoed: {raw[:300]!r} to {sent!r}")


class Budget:
    """Limit of an attack: a number of tries or a time, whichever comes first."""

    def __init__(self, tries: float, seconds: float) -> None:
        self._left = tries
        self._until = time.monotonic() + seconds

    def more(self) -> bool:
        """Whether another try is to be made; counts it."""
        self._left -= 1
        return self._left >= 0 and time.monotonic() < self._until


async def several(budget: Budget, one: Callable[[], Awaitable[None]], at_once: int = 8) -> None:
    """Make tries, ``at_once`` at a time, until the budget is spent."""

    async def loop() -> None:
        while budget.more():
            await one()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(loop())


Attack = Callable[[Target, random.Random, Tally, Budget], Awaitable[None]]


def _code_of(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error["type"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return "?"
