"""Slots that can be asked about: running ones, and as many ended ones as the bounds allow."""

from orchestrator.clock import Clock
from orchestrator.retention import KeptStore, Retention
from orchestrator.slots.slot import Slot


class SlotStore(KeptStore[Slot]):
    """Slots by id, with their files."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        super().__init__(clock, retention, "slot")

    def add(self, slot: Slot) -> None:
        """Keep a slot."""
        slot.on_end.append(self.item_ended)
        self.keep(slot)
