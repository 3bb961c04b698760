"""Operations on a task's records, as they are handed to the journal's thread."""

from dataclasses import dataclass, field

from orchestrator.tasks.journal.records import StoredRequest, StoredResult, StoredTokens, TaskRow


@dataclass(frozen=True, slots=True)
class Accept:
    """A task that must be on the disk before it is promised to anybody."""

    row: TaskRow
    request: StoredRequest | None
    """Request to run the task by; None where an earlier process wrote one that is unreadable."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """More tokens of a task, from index ``first`` on."""

    n: int
    first: int
    tokens: StoredTokens


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has ended."""

    n: int
    ended_unix: float
    completion_tokens: int
    result: StoredResult
    is_accepted: bool = True
    """Whether somebody was told of the task; if not, it keeps no idempotency key."""


Operation = Accept | Tokens | Ended


@dataclass(slots=True)
class Batch:
    """The operations of one transaction, whether it succeeded or not."""

    operations: list[Operation] = field(default_factory=list)
    took_s: float = 0.0
    fault: str = ""
    """Why none of it is on the disk; empty if all of it is."""
    lost: set[int] = field(default_factory=set)
    """Numbers of tasks that another orchestrator has taken on: nothing of them was written."""
    named_elsewhere: set[int] = field(default_factory=set)
    """Numbers of tasks that were not accepted, because their key has a task of that name."""
