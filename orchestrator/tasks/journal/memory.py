"""Records of requests beyond their life, in memory. Durable storage (OR-5) goes behind this."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from worker.protocol import Outcome


@dataclass(frozen=True, slots=True)
class Record:
    """How one offered request ended, without anything that it said."""

    task_id: str
    correlation_id: str
    api: str
    model: str
    outcome: Outcome
    code: str
    prompt_tokens: int
    completion_tokens: int
    ended_unix: float


class Journal(Protocol):
    """Takes one record per offered request, when it ends."""

    def settled(self, record: Record) -> None: ...


class MemoryJournal:
    """The last ``size`` records, lost with the process."""

    def __init__(self, size: int = 1000) -> None:
        self.records: deque[Record] = deque(maxlen=size)

    def settled(self, record: Record) -> None:
        self.records.append(record)
