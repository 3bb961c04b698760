"""Sums that the orchestrators keep together: what keys and runs have spent.

Each writes its own part of a sum under its own tag, so that a part that is written twice counts
once, and the part of a process that has ended stays.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, Final

from orchestrator.sharing import Sums
from orchestrator.state.connection import Names
from orchestrator.state.members import Members

EVERY_S = 1.0
"""Seconds between two exchanges."""
KEEP_S: Final = 62 * 86_400.0
"""Seconds that the store keeps a sum without changes: this month's and the last one's."""


class SharedSums:
    """Exchanges sums with the others, as a part of the renewals of the lease."""

    def __init__(self, members: Members, names: Names, tag: str, sums: Sums) -> None:
        self._names = names
        self._tag = tag
        self._sums = sums
        self._next_at = -math.inf
        self._asked: list[str] = []
        members.parts.append(self)

    def ask(self, pipe: Any) -> int:
        self._asked.clear()
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + EVERY_S
            for name, (tokens, cost) in self._sums.own().items():
                sum_name = self._names.sum(name)
                pipe.hset(sum_name, self._tag, f"{tokens} {cost}")
                pipe.pexpire(sum_name, round(1000 * KEEP_S))
                pipe.hgetall(sum_name)
                self._asked.append(name)
        return 3 * len(self._asked)

    def receive(self, answers: Sequence[Any]) -> None:
        for name, parts in zip(self._asked, answers[2::3], strict=True):
            if isinstance(parts, Exception):  # it is asked again with the next exchange
                continue
            others = [part.split() for tag, part in parts.items() if tag.decode() != self._tag]
            tokens, cost = sum(int(part[0]) for part in others), sum(float(p[1]) for p in others)
            self._sums.hear(name, (tokens, cost))
