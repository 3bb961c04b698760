"""The room's settings."""

from typing import Annotated, ClassVar

from pydantic import Field

from orchestrator.settings.room_section import RoomSection
from worker.environment import HIDDEN


class BatchSection(RoomSection):
    """Files and batches (docs/batches.md), in the folder JOURNAL.batches beside the journal."""

    table: ClassVar = "batches"

    window: Annotated[int, HIDDEN] = Field(default=32, ge=1, le=10_000)
    """Most lines of all batches in progress at once. As many as the instances can run keep them
    busy; more wait in the queue, where interactive work goes first."""
    file_bytes: Annotated[int, HIDDEN] = Field(default=256 * 2**20, ge=1024)
    """Most bytes in one file."""
    folder_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Most bytes that all files may take on the disk. A tenth of it is reserved for the results of
    batches, which wait when that is full too."""
    keep_s: float = Field(default=7 * 86_400.0, ge=0)
    """How long a file is kept after its upload, and a batch with its results after its end."""
