"""Attributes time to parts: calls are wrapped, and wrapped calls within them count for
themselves."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any


class Stopwatch:
    """Nanoseconds by part since the last ``take``. For one thread."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._part = ""
        self._since = 0
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of ``owner.name`` for ``part``, less that of wrapped calls within it."""
        call = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            outer = self._switch(part)
            try:
                return call(*args, **named)
            finally:
                self._switch(outer)

        own = vars(owner).get(name)
        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, call) if own else delattr(owner, name))

    def take(self) -> dict[str, int]:
        """Nanoseconds spent since the last ``take``, by part; counts anew from here."""
        spent, self._spent = self._spent, {}
        return spent

    def unwrap(self) -> None:
        """Undo all wraps."""
        while self._undo:
            self._undo.pop()()

    def _switch(self, part: str) -> str:
        """Count for ``part`` from now on; returns what was counted for before."""
        now = perf_counter_ns()
        outer, self._part = self._part, part
        if outer:
            self._spent[outer] = self._spent.get(outer, 0) + now - self._since
        self._since = now
        return outer
