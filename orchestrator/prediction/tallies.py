"""Answers by length, as orchestrators tell each other of them.

Each tells of the answers that came to itself since it last did, and nobody tells of others', so
that none is counted twice. What all of them know is kept in one place, where older answers lose
weight with each new one, whoever has it: together they forget as one orchestrator does.
"""

import msgspec

_LEAST = 1e-3


class LengthCounts(msgspec.Struct, frozen=True):
    """What all orchestrators have learnt of one kind of answer, by bin of its length."""

    answers: int
    """How many answers there ever were; older ones count for less."""
    ended: dict[int, float]
    cut: dict[int, float]
    """Answers that got there, and were cut by a deadline, a cap or a cancel."""


class LengthTally:
    """Answers of one kind that nobody was told of yet."""

    __slots__ = ("answers", "cut", "ended", "kept")

    def __init__(self) -> None:
        self.answers = 0
        self.kept = 1.0
        """Share of what was known before that is still believed: answers may become others."""
        self.ended: dict[int, float] = {}
        self.cut: dict[int, float] = {}

    def add(self, at: int, *, finished: bool) -> None:
        self.answers += 1
        counts = self.ended if finished else self.cut
        counts[at] = counts.get(at, 0.0) + 1

    def scale(self, factor: float) -> None:
        for counts in (self.ended, self.cut):
            for at, count in list(counts.items()):
                counts[at] = count * factor
                if counts[at] < _LEAST:
                    del counts[at]

    def follow(self, earlier: "LengthTally") -> None:
        self.answers += earlier.answers
        for mine, theirs in ((self.ended, earlier.ended), (self.cut, earlier.cut)):
            for at, count in theirs.items():
                mine[at] = mine.get(at, 0.0) + count * self.kept
        self.kept *= earlier.kept
