"""The outcome of each line of a batch. Its two files are the record: a line is done once its entry
is in one of them, so that no kill loses or doubles one.

Everything here blocks, and is called on one thread.
"""

from collections import Counter

from orchestrator.batches.folder import Appender, Folder
from orchestrator.batches.frames import read_frames
from orchestrator.batches.records import LineOutcome, StoredBatch


class Ledger:
    """The outcomes of one batch: open, put entries, close. Raises ``OSError``."""

    def __init__(self, folder: Folder, batch: StoredBatch) -> None:
        """Read what an earlier process wrote, without an entry in whose middle it was cut short."""
        self.counts: Counter[LineOutcome] = Counter()
        self.bytes = dict.fromkeys((batch.output_id, batch.errors_id), 0)
        """Bytes of the entries, by file."""
        self._folder = folder
        self._batch = batch
        self._done = bytearray()
        self._writers: dict[str, Appender] = {}
        try:
            for name in self.bytes:
                end = self._read(folder, name)
                self._writers[name] = folder.writer(name, end)
        except BaseException:  # it is tried again for as long as the disk is full
            for writer in self._writers.values():
                writer.close()
            raise

    def _read(self, folder: Folder, name: str) -> int:
        end, path = 0, folder.data(name)
        if path.exists():
            for frame in read_frames(path):
                self._mark(frame.number, LineOutcome(frame.kind), name, len(frame.payload))
                end = frame.end
        return end

    def is_done(self, number: int) -> bool:
        """Whether the line of that number is done."""
        return number < len(self._done) and bool(self._done[number])

    def put(self, number: int, kind: LineOutcome, entry: bytes) -> None:
        """Write the outcome of a line, once. Entries of expired or cancelled lines are short, and
        are written even beyond the folder's bound."""
        if kind in (LineOutcome.SUCCEEDED, LineOutcome.ERRORED):
            self._folder.require_room(len(entry), is_upload=False)
        assert not self.is_done(number), f"line {number} would have two entries"
        batch = self._batch
        name = batch.output_id if kind is LineOutcome.SUCCEEDED else batch.errors_id
        self._writers[name].append(number, kind, entry)
        self._mark(number, kind, name, len(entry))

    def close(self) -> None:
        """Flush everything to the disk, and close the files. Where that fails it may be called
        again."""
        for writer in self._writers.values():
            writer.sync()
            writer.close()

    def _mark(self, number: int, kind: LineOutcome, name: str, size: int) -> None:
        if number >= len(self._done):
            self._done.extend(bytes(number + 1 - len(self._done)))
        self._done[number] = 1
        self.counts[kind] += 1
        self.bytes[name] += size
