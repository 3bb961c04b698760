"""Durable tasks in a file of this orchestrator's own."""

from collections.abc import Callable, Sequence

from orchestrator.tasks.journal.file import JournalFile
from orchestrator.tasks.journal.operations import Accept, Batch
from orchestrator.tasks.journal.reader import JournalReader
from orchestrator.tasks.journal.writer import JournalWriter


class FileStore:
    """A ``JournalStore`` over an opened file."""

    def __init__(self, file: JournalFile) -> None:
        self.boot = file.boot
        self.window_ms = file.config.terms.window_ms
        self.next_n = file.next_n
        self.unfinished = file.unfinished
        self._file = file

    def new_writer(
        self,
        unix: Callable[[], float],
        *,
        on_batch: Callable[[Batch], None],
        on_fault: Callable[[str], None],
        live: Callable[[], Sequence[Accept]],
    ) -> JournalWriter:
        return JournalWriter(self._file, unix, on_batch=on_batch, on_fault=on_fault, live=live)

    def new_reader(self) -> JournalReader:
        return JournalReader(self._file)

    def close(self) -> None:
        self._file.close()
