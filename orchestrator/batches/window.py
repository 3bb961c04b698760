"""Limits the lines of all batches in progress, and chooses the next line. Does no I/O."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count


class Window:
    """Admits ``size`` lines at a time. The next line is from the owner with the fewest lines in
    progress, in turn if several have as few, and from that owner's earliest batch. An owner may
    have at most ``most_of(owner)`` lines, including resting ones."""

    def __init__(self, size: int, most_of: Callable[[str], int]) -> None:
        self.under_way: Counter[str] = Counter()
        """Number of lines in progress, by owner."""
        self.resting: Counter[str] = Counter()
        """Number of lines that wait for another try, by owner. They hold no place."""
        self._size = size
        self._most_of = most_of
        self._waiting: dict[str, list[tuple[float, int, WindowPlace]]] = {}
        self._served: dict[str, int] = {}
        """Sequence number of each owner's last admitted line."""
        self._numbers = count()

    def wait(self, place: "WindowPlace") -> None:
        """Queue a place and admit it in its turn."""
        own = self._waiting.setdefault(place.owner, [])
        heappush(own, (place.due_at, next(self._numbers), place))
        self.admit()

    def admit(self) -> None:
        while self.under_way.total() < self._size and (owner := self._next()) is not None:
            _, _, place = heappop(self._waiting[owner])
            self._served[owner] = next(self._numbers)
            place.let_in()

    def _next(self) -> str | None:
        eligible = []
        for owner, own in list(self._waiting.items()):
            while own and not own[0][2].is_waiting:
                heappop(own)
            if not own:
                del self._waiting[owner]
                continue
            under_way = self.under_way[owner]
            if under_way + self.resting[owner] < min(self._size, self._most_of(owner)):
                eligible.append((under_way, self._served.get(owner, -1), owner))
        return min(eligible)[2] if eligible else None


@dataclass(slots=True, eq=False)
class WindowPlace:
    """One line's place in the window. The caller must always call ``leave``."""

    _window: Window
    owner: str
    due_at: float
    _counted_in: Counter[str] | None = None
    _turn: asyncio.Future[bool] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._turn is not None and not self._turn.done()

    async def take(self) -> bool:
        """Wait for the place, also after ``rest``. False if it is given up meanwhile."""
        self._count_in(None)
        self._turn = asyncio.get_running_loop().create_future()
        self._window.wait(self)
        return await self._turn

    def let_in(self) -> None:
        assert self._turn is not None
        self._count_in(self._window.under_way)
        self._turn.set_result(True)

    def give_up(self) -> None:
        if self._turn is not None and self.is_waiting:
            self._turn.set_result(False)

    def rest(self) -> None:
        """Release the place for other lines until the next ``take``."""
        self._count_in(self._window.resting)
        self._window.admit()

    def leave(self) -> None:
        """Release the place: the line has ended or never started."""
        self._count_in(None)
        self._window.admit()

    def _count_in(self, counter: Counter[str] | None) -> None:
        if self._counted_in is not None:
            self._counted_in[self.owner] -= 1
        if counter is not None:
            counter[self.owner] += 1
        self._counted_in = counter
