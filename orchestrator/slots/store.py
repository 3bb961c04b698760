"""Keeps slots that can be asked about: running ones, and ended ones within bounds."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.errors import NotFound
from orchestrator.slots.slot import Slot


def no_such_slot(slot_id: str) -> NotFound:
    """The answer for an unknown id, and for a slot that is not the caller's."""
    return NotFound(f"there is no slot {slot_id[:64]!r}; ended ones are kept for a while only")


@dataclass(frozen=True, slots=True)
class SlotKeepConfig:
    """Bounds on ended slots, which are kept with their files while all bounds hold."""

    max_slots: int
    max_age_s: float
    max_bytes: int


class SlotStore:
    """Slots by id. Ended ones are dropped oldest first."""

    def __init__(self, clock: Clock, config: SlotKeepConfig) -> None:
        self.on_forget: list[Callable[[Slot], None]] = []
        """Called with each slot that is dropped."""
        self.latest_end = -math.inf
        """When the last slot ended; its client has yet to fetch its files, which are only here."""
        self._clock = clock
        self._config = config
        self._running: dict[str, Slot] = {}
        self._ended: OrderedDict[str, Slot] = OrderedDict()
        self._bytes: dict[str, int] = {}
        """Bytes that each ended slot takes, by id."""
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def __contains__(self, slot: Slot) -> bool:
        return slot.id in self._running or slot.id in self._ended

    def add(self, slot: Slot) -> None:
        """Keep a slot."""
        slot.on_end.append(self._slot_ended)
        self._running[slot.id] = slot

    def get(self, slot_id: str) -> Slot:
        """The slot of that id. Raises ``NotFound``."""
        self.prune()
        slot = self._running.get(slot_id) or self._ended.get(slot_id)
        if slot is None:
            raise no_such_slot(slot_id)
        return slot

    def running(self) -> Iterator[Slot]:
        """Slots that have not ended, the newest first."""
        return reversed(self._running.values())

    def newest_first(self) -> Iterator[Slot]:
        """Running slots, then ended ones, each the newest first."""
        self.prune()
        yield from self.running()
        yield from reversed(self._ended.values())

    def prune(self) -> None:
        """Forget ended slots beyond a bound, oldest first."""
        config = self._config
        oldest_kept = self._clock.now() - config.max_age_s
        while self._ended:
            slot = next(iter(self._ended.values()))
            if (
                len(self._ended) <= config.max_slots
                and self.total_bytes <= config.max_bytes
                and slot.marks.ended >= oldest_kept
            ):
                return
            del self._ended[slot.id]
            self.total_bytes -= self._bytes.pop(slot.id)
            for call in self.on_forget:
                call(slot)

    def _slot_ended(self, slot: Slot) -> None:
        del self._running[slot.id]
        self._ended[slot.id] = slot
        self.latest_end = slot.marks.ended
        self._bytes[slot.id] = slot.kept_bytes
        self.total_bytes += self._bytes[slot.id]
        self.prune()
