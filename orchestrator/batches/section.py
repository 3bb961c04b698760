"""Settings of batches, and their fixed limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from pydantic import Field

from orchestrator.settings.rooms import RoomSection


class BatchSection(RoomSection):
    """Files and batches (docs/batches.md), in the folder JOURNAL.batches next to the journal."""

    table: ClassVar = "batches"

    folder_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Most bytes that all files may take on disk. A tenth of it is reserved for the results of
    batches. If that is full too, batches wait."""


WINDOW: Final = 32
"""Most lines of all batches in progress at once. A number that the instances can run keeps them
busy. More lines would wait in the queue, where interactive work goes first."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Settings of batches. Sizes are in bytes, times in seconds."""

    folder: Path
    window: int = WINDOW
    max_lines: int = 100_000
    """Most lines of one batch."""
    line_bytes: int = 4 * 2**20
    file_bytes: int = 256 * 2**20
    folder_bytes: int = 4 * 2**30
    """Most bytes of all files together."""
    keep_s: float = 7 * 86_400.0
    """Retention of a file after its creation, and of a batch and its results after its end."""
    attempts: int = 3
    """Most tries of a line that loses its instance every time."""
