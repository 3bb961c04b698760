"""What is written down of a task, as it is handed to the journal's thread."""

from dataclasses import dataclass, field

from orchestrator.tasks.journal.records import StoredRequest, StoredResult, StoredTokens, TaskRow


@dataclass(frozen=True, slots=True)
class Accept:
    """A task that is to be on the disk before it is promised to anybody."""

    row: TaskRow
    request: StoredRequest | None
    """None where an earlier process wrote one that cannot be read."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some more of its tokens, from index ``first`` on."""

    n: int
    first: int
    tokens: StoredTokens


@dataclass(frozen=True, slots=True)
class Ended:
    """It is over."""

    n: int
    ended_unix: float
    completion_tokens: int
    result: StoredResult
    is_accepted: bool = True
    """Else nobody was told of it: it keeps no idempotency key."""


Operation = Accept | Tokens | Ended


@dataclass(slots=True)
class Batch:
    """What one transaction wrote, or did not."""

    operations: list[Operation] = field(default_factory=list)
    took_s: float = 0.0
    fault: str = ""
    """Why nothing of it is on the disk; empty where all is."""
