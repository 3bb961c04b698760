"""What durable tasks are kept in: a file of this orchestrator's own, or a store that several
share."""

from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.clock import Boot
from orchestrator.tasks.journal.group_commit import GroupCommit
from orchestrator.tasks.journal.look_ups import LookUps
from orchestrator.tasks.journal.operations import Accept, Batch
from orchestrator.tasks.journal.records import UnfinishedTask


class JournalStore(Protocol):
    """An opened store, until ``close``."""

    @property
    def boot(self) -> Boot: ...

    @property
    def window_ms(self) -> float:
        """How much may be lost with the process, in ms; 0: a task is stored before its 202."""

    @property
    def next_n(self) -> int:
        """Number of the next task; tasks have rising numbers within a process."""

    @property
    def unfinished(self) -> Sequence[UnfinishedTask]:
        """Tasks that an earlier process left here."""

    def new_writer(
        self,
        unix: Callable[[], float],
        *,
        on_batch: Callable[[Batch], None],
        on_fault: Callable[[str], None],
        live: Callable[[], Sequence[Accept]],
    ) -> GroupCommit:
        """What writes to the store, not started yet. ``live`` returns the tasks that have not
        ended, with which an empty store begins."""

    def new_reader(self) -> LookUps:
        """What looks tasks up in the store."""

    def close(self) -> None:
        """Release the store. It must not be written to any more."""
