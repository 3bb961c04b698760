"""Decides which of several processes has the folder of files and batches.

It is the one that has the journal's locks. The kernel holds these for a process for as long as it
lives, stopped or not (flock(2)), so that no two ever write there, and another one can go on as soon
as it has ended.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from orchestrator.tasks.journal.file import JournalConfig, JournalFile, open_journal
from orchestrator.tasks.journal.lock import JournalError, JournalHeld
from orchestrator.telemetry.log import service_log

TRY_EVERY_S = 0.5
"""Time between two tries to have the folder, in seconds."""


def folder_of(journal: Path) -> Path:
    """The folder beside a journal."""
    return Path(f"{journal}.batches")


class Claim:
    """One process's claim to the folder beside a journal."""

    def __init__(
        self, config: JournalConfig, file: JournalFile | None, on_granted: Callable[[], None]
    ) -> None:
        """``file`` is the journal, where this process has it already."""
        self._config = config
        self._file = file
        self._on_granted = on_granted

    async def granted(self) -> Path:
        """Wait until the folder is this process's, which it stays; returns its path."""
        was_told = False
        while self._file is None:
            await asyncio.sleep(TRY_EVERY_S)
            try:
                self._file = await asyncio.to_thread(open_journal, self._config)
            except JournalHeld:
                continue
            except JournalError as error:
                if not was_told:
                    service_log.warning("no files and batches for now; will retry: %s", error)
                was_told = True
                continue
            service_log.info("files and batches are kept by this process from now on")
        self._on_granted()
        return folder_of(self._file.config.path)  # behind any link to the journal

    def close(self) -> None:
        """Leave the folder to another process. Nothing may be written there any more."""
        if self._file is not None:
            self._file.close()
