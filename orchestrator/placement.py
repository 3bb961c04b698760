"""Which instance takes a task: a pure function of the task's needs and a registry snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance as placement sees it.

    ``vocabulary`` names the tokenizer: token ids only mean something to one that has the same.
    ``slots`` is how many jobs it takes before they wait, ``load`` how many it has.
    """

    name: str
    model: str
    vocabulary: bytes
    ready: bool
    slots: int
    load: int

    @property
    def free(self) -> int:
        return self.slots - self.load


@dataclass(frozen=True, slots=True)
class Need:
    """What a task asks of an instance."""

    model: str
    vocabulary: bytes


def place(need: Need, candidates: Sequence[Candidate]) -> Candidate | None:
    """The least loaded instance with room, by share of its slots; None when there is none.

    Ties go to the smaller name, so that the choice is reproducible.
    """
    able = [
        c
        for c in candidates
        if c.ready and c.free > 0 and c.model == need.model and c.vocabulary == need.vocabulary
    ]
    return min(able, key=lambda c: (c.load / c.slots, c.load, c.name), default=None)
