"""A disk tier whose threads are run by hand, over a memory of numbers or of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.support.memory import FakeMemory
from worker.kv_disk.block_file import BlockFormat, Bytes
from worker.kv_disk.block_store import BlockStore
from worker.kv_disk.transfers import Task

SMALL = BlockFormat("U8", (1, 16), 16)
ROOMY = (10**9, 10**9)
"""Free and total bytes of a disk that nobody else uses."""


@dataclass
class ByHand:
    """A ``Background`` that does a task when told to."""

    tasks: list[Task] = field(default_factory=list)
    closed: bool = False

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def run_one(self) -> None:
        self.tasks.pop(0)()

    def run(self) -> None:
        while self.tasks:
            self.run_one()

    def close(self, grace_s: float) -> None:
        self.closed = True
        if grace_s:
            self.run()


class TokenMemory:
    """``KVMemory`` over a ``FakeMemory``: a file holds a number that stands for a block's cells."""

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory
        self._contents: list[list[object]] = []

    @property
    def format(self) -> BlockFormat:
        return SMALL

    def staging(self, blocks: int) -> Bytes:
        return np.zeros((min(blocks, 3), SMALL.block_bytes), np.uint8)

    def copy_out(self, blocks: Sequence[int], staging: Bytes) -> None:
        for row, block in enumerate(blocks):
            self._contents.append(list(self._memory.cells[block]))
            number = len(self._contents) - 1
            staging[row] = np.frombuffer(number.to_bytes(16, "little"), np.uint8)

    def copy_in(self, staging: Bytes, blocks: Sequence[int]) -> None:
        for row, block in enumerate(blocks):
            number = int.from_bytes(staging[row].tobytes(), "little")
            self._memory.cells[block] = list(self._contents[number])


def make_store(
    root: Path, blocks: int = 100, usage: tuple[int, int] = ROOMY, of: BlockFormat = SMALL
) -> BlockStore:
    return BlockStore(root, of, most_bytes=blocks * of.file_bytes, usage=lambda path: usage)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int, of: BlockFormat = SMALL) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, of.block_bytes).astype(np.uint8)
