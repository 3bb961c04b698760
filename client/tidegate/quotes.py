"""Quotes: the chance that a request is in time, by deadline, before it is sent; and reservations.

::

    quote = await client.quote("Tell me a story.", max_tokens=200, accept=0.99)
    print(quote.chance_by(2000))                       # of being done within 2 s, if sent now
    story = await client.generate(
        "Tell me a story.", max_tokens=200, reservation=quote.reservation
    )
"""

import time
from bisect import bisect_right
from typing import Any

import msgspec

from tidegate.deadlines import Deadline, to_seconds
from tidegate.requests import Prompt, TaskOptions, task_body


class QuotedChance(msgspec.Struct, frozen=True):
    """The chance of being in time with ``within_ms`` from the quote until the deadline, which is
    ``deadline_unix_ms`` in epoch milliseconds."""

    chance: float
    within_ms: float
    deadline_unix_ms: int


class Reservation(msgspec.Struct, frozen=True):
    """A deadline that the service holds for one request, no larger than the quoted one, which must
    come before ``held_until_unix_ms``. Later it is served as any other."""

    chance: float
    within_ms: float
    deadline_unix_ms: int
    held_until_unix_ms: int

    @property
    def left_s(self) -> float:
        """Seconds from now until the deadline, by this machine's clock."""
        return self.deadline_unix_ms / 1000 - time.time()


class Quote(msgspec.Struct, frozen=True):
    """What the service expects of one request."""

    model: str
    prompt_tokens: int
    max_tokens: int
    curve: tuple[QuotedChance, ...]
    """Chances if it is sent now, by deadline, rising."""
    stated: QuotedChance | None
    """The chance by the deadline that was stated; None if none was."""
    earliest: tuple[QuotedChance, ...]
    """The earliest deadlines that can be reserved, with 50, 90 and 99 %."""
    reservation: Reservation | None
    """What was reserved, if ``accept`` asked for it."""

    def chance_by(self, ms: float) -> float:
        """The chance of being done within ``ms``, if it is sent now: between the curve's points by
        a straight line, beyond them that of the last one."""
        at = bisect_right([point.within_ms for point in self.curve], ms)
        if at == 0:
            return 0.0
        before = self.curve[at - 1]
        if at == len(self.curve):
            return before.chance
        after = self.curve[at]
        part = (ms - before.within_ms) / (after.within_ms - before.within_ms)
        return before.chance + part * (after.chance - before.chance)


def quote_body(
    prompt: Prompt | None,
    prompt_tokens: int | None,
    accept: float | None,
    hold: Deadline,
    options: TaskOptions,
    due_s: float | None,
) -> dict[str, Any]:
    """Body of ``POST /v2/quote``. Raises ``ValueError`` unless there is one of a prompt and its
    length."""
    if (prompt is None) is (prompt_tokens is None):
        raise ValueError("a quote needs either a prompt or prompt_tokens, its length alone")
    body = task_body("" if prompt is None else prompt, options, due_s)
    if prompt is None:
        del body["prompt"]
        body["prompt_tokens"] = prompt_tokens
    if accept is not None:
        body |= {"accept": accept, "hold_ms": to_seconds(hold) * 1000}
    return body
