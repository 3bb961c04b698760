"""Which job has which of llama.cpp's sequences, and what the idle ones still hold.

A sequence keeps its KV cells after its job has ended. A prompt that begins alike takes it over, or
shares the cells of another one's head. Cells are reserved to a job's end before it starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_WORTH_TAKING: Final = 2
"""An idle text is taken for its head where that is at least one part in so many of it; else only
when no other is idle."""


@dataclass(slots=True, eq=False)
class Slot:
    """One of llama.cpp's sequences. ``tokens`` are those whose KV it holds, in order."""

    index: int
    tokens: list[int] = field(default_factory=list)
    salt: str = ""
    """Of those tokens: prompts with another one do not share them."""
    limit: int = 0
    """Cells reserved for the job that has it; 0: it is idle."""
    used_at: int = 0
    """Counts takings; the least has been idle for longest."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A slot for a job. Before its first step, in this order: cut ``slot`` to ``cut_to``, copy
    ``copied`` positions of ``source`` where there is one, forget ``evicted`` whole (``source`` may
    be among them: shared cells stay)."""

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
    """All slots. ``unified``: cells are of one pool, and sequences may share them; else each slot
    has an equal part. Without ``reuse`` nothing outlives its job."""

    def __init__(self, count: int, cells: int, *, unified: bool, reuse: bool) -> None:
        self.cells = cells
        self.slots = [Slot(index) for index in range(count)]
        self._unified = unified
        self._reuse = reuse
        self._takings = 0
        self.evicted_tokens = 0
        """In all, of idle slots that had to go."""

    @property
    def reserved_cells(self) -> int:
        return sum(slot.limit for slot in self.slots)

    @property
    def idle_cells(self) -> int:
        """That hold what may be found again."""
        return sum(len(slot.tokens) for slot in self.slots if not slot.limit)

    @property
    def longest(self) -> int:
        """Cells that one job can have."""
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
        """The job is over. False: what the slot holds is to be forgotten now, as it always is where
        it is not ``is_sound``."""
        slot.limit = 0
        is_kept = self._reuse and is_sound
        if not is_kept:
            slot.tokens = []
        return is_kept

    def forget_idle(self) -> list[Slot]:
        """Give up all that idle slots hold; those that held something."""
        held = [slot for slot in self.slots if not slot.limit and slot.tokens]
        for slot in held:
            self._forget(slot)
        return held

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not add up."""
        if self._unified:
            assert self.reserved_cells + self.idle_cells <= self.cells
        for slot in self.slots:
            assert not slot.limit or len(slot.tokens) <= slot.limit <= self.longest

    def _shared(self, slot: Slot, prompt: Sequence[int], salt: str) -> int:
        """How many tokens a slot's text and the prompt begin with alike."""
        if not self._reuse or slot.salt != salt:
            return 0
        most = min(len(slot.tokens), len(prompt) - 1)
        if slot.tokens[:most] == list(prompt[:most]):
            return most
        return next(i for i in range(most) if slot.tokens[i] != prompt[i])

    def _evict(self, keep: Slot | None) -> list[Slot]:
        """Idle slots that must go, those idle for longest first, a source of cells last."""
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
    """What is gained by cutting an idle slot's text after ``head`` tokens; 0: too much is lost."""
    return head if head * _WORTH_TAKING >= len(slot.tokens) else 0
