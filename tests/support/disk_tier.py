"""A disk tier whose threads are run by hand, over a memory of numbers or of tokens."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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


def make_store(
    root: Path, blocks: int = 100, usage: tuple[int, int] = ROOMY, of: BlockFormat = SMALL
) -> BlockStore:
    return BlockStore(root, of, most_bytes=blocks * of.file_bytes, usage=lambda path: usage)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int, of: BlockFormat = SMALL) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, of.block_bytes).astype(np.uint8)
