"""The room's settings."""

from typing import ClassVar

from pydantic import Field

from orchestrator.settings.rooms import RoomSection


class BatchSection(RoomSection):
    """Files and batches (docs/batches.md), in the folder JOURNAL.batches next to the journal."""

    table: ClassVar = "batches"

    folder_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Most bytes that all files may take on disk. A tenth of it is reserved for the results of
    batches. If that is full too, batches wait."""
