"""Assigns llama.cpp's sequences to jobs, and knows what the idle ones still hold.

A sequence keeps its KV cells after its job has ended. A prompt that begins alike takes it over, or
shares the cells of another one's head. Cells are reserved to a job's end before it starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_WORTH_TAKING: Final = 2
"""An idle text is cut for its head where that is at least 1/2 of it (1 divided by this); otherwise
only when no other is idle."""


@dataclass(slots=True, eq=False)
class Slot:
    """One of llama.cpp's sequences. ``tokens`` are those whose KV it holds, in order."""

    index: int
    tokens: list[int] = field(default_factory=list)
    salt: str = ""
    """Cache salt of those tokens: prompts with another salt do not share them."""
    limit: int = 0
    """Cells reserved for the job that has the slot; 0 while it is idle."""
    used_at: int = 0
    """Number of its latest taking; among idle slots the least is the oldest."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A slot taken for a job. Before its first step, in this order: cut ``slot`` to ``cut_to``,
    copy ``copied`` positions of ``source`` where there is one, forget ``evicted`` whole (``source``
    may be among them: shared cells stay)."""

    slot: Slot
    cut_to: int
    source: Slot | None
    copied: int
    evicted: list[Slot]

    @property
    def kept(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return self.copied if self.source is not None else self.cut_to


class Sequences:
    """All slots. ``unified``: sequences have cells of one pool, and may share them; otherwise each
    slot has an equal part. Without ``reuse`` nothing outlives its job."""

    def __init__(self, count: int, cells: int, *, unified: bool, reuse: bool) -> None:
        self.cells = cells
        self.slots = [Slot(index) for index in range(count)]
        self._unified = unified
        self._reuse = reuse
        self._takings = 0
        self.evicted_tokens = 0
        """Tokens of all idle slots evicted so far."""

    @property
    def reserved_cells(self) -> int:
        return sum(slot.limit for slot in self.slots)

    @property
    def idle_cells(self) -> int:
        """Cells of idle slots, whose texts may be found again."""
        return sum(len(slot.tokens) for slot in self.slots if not slot.limit)

    @property
    def longest(self) -> int:
        """Most cells that one job can have."""
        return self.cells if self._unified else self.cells // len(self.slots)

    def take(self, prompt: Sequence[int], limit: int, salt: str = "") -> Taken | None:
        """A slot for a job that may come to ``limit`` tokens; None while none fits.

        At least one token of ``prompt`` is left to compute.
        """
        idle = [slot for slot in self.slots if not slot.limit]
        if not idle or limit > self.longest:
            return None
        if self._unified and self.reserved_cells + limit > self.cells:
            return None
        heads = {slot: self._shared(slot, prompt, salt) for slot in self.slots}
        slot = min(idle, key=lambda one: (-_worth(one, heads[one]), one.used_at, one.index))
        cut_to = heads[slot]
        source: Slot | None = None
        if self._unified:
            best = max(self.slots, key=lambda one: heads[one])
            source = best if heads[best] > cut_to else None
        copied = heads[source] if source is not None else 0
        self._takings += 1
        slot.used_at, slot.limit, slot.salt = self._takings, limit, salt
        slot.tokens = list(prompt[: copied or cut_to])
        evicted = self._evict(keep=source) if self._unified else []
        return Taken(slot, 0 if source is not None else cut_to, source, copied, evicted)

    def release(self, slot: Slot, *, is_sound: bool = True) -> bool:
        """Free a slot whose job is over. False: the caller must forget what the slot holds, as
        always when that is not ``is_sound``."""
        slot.limit = 0
        is_kept = self._reuse and is_sound
        if not is_kept:
            slot.tokens = []
        return is_kept

    def forget_idle(self) -> list[Slot]:
        """Give up all that idle slots hold; returns the slots that held something."""
        held = [slot for slot in self.slots if not slot.limit and slot.tokens]
        for slot in held:
            self._forget(slot)
        return held

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the counts of cells contradict each other."""
        if self._unified:
            assert self.reserved_cells + self.idle_cells <= self.cells
        for slot in self.slots:
            assert not slot.limit or len(slot.tokens) <= slot.limit <= self.longest

    def _shared(self, slot: Slot, prompt: Sequence[int], salt: str) -> int:
        """Length in tokens of the common head of a slot's text and ``prompt``, without its last."""
        if not self._reuse or slot.salt != salt:
            return 0
        most = min(len(slot.tokens), len(prompt) - 1)
        if slot.tokens[:most] == list(prompt[:most]):
            return most
        return next(i for i in range(most) if slot.tokens[i] != prompt[i])

    def _evict(self, keep: Slot | None) -> list[Slot]:
        """Forget idle slots until the cells suffice: oldest first, ``keep`` last. Returns them."""
        idle = [slot for slot in self.slots if not slot.limit and slot.tokens]
        idle.sort(key=lambda slot: (slot is keep, slot.used_at))
        excess = self.reserved_cells + self.idle_cells - self.cells
        gone = []
        for slot in idle:
            if excess <= 0:
                break
            excess -= len(slot.tokens)
            self._forget(slot)
            gone.append(slot)
        return gone

    def _forget(self, slot: Slot) -> None:
        self.evicted_tokens += len(slot.tokens)
        slot.tokens = []


def _worth(slot: Slot, head: int) -> int:
    """Tokens gained by cutting an idle slot's text after ``head``; 0 where too much is lost."""
    return head if head * _WORTH_TAKING >= len(slot.tokens) else 0
