"""One job on a lane to another kind of server, and how it can fail."""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.clock import Timer
from orchestrator.lanes.base import JobSink
from orchestrator.lanes.servers.text import StopCutter, TokenCounter
from protocol import NO_TOKEN_ID, Code, FinishReason, OnDeadline, Sampling


class ServerLost(Exception):
    """The server is unreachable or was lost during an answer; the message says how."""


class JobFailed(Exception):
    """The server refused a job or failed on it."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Finish(NamedTuple):
    """The end of a text."""

    reason: FinishReason
    stop: str = ""
    stop_token_id: int | None = None
    cached_tokens: int = 0
    tail: str = ""
    """Text after the last token."""


@dataclass(eq=False, slots=True)
class ServerJob:
    """A job's request and its progress. Times are seconds of the lane's clock."""

    handle: int
    sink: JobSink
    token_ids: list[int]
    sampling: Sampling
    on_deadline: OnDeadline
    correlation_id: str
    sent_at: float
    ends_at: float
    cache_salt: str = ""
    cutter: StopCutter | None = None
    """Ends the text at stop strings if the server does not."""
    counter: TokenCounter | None = None
    """Counts the tokens of the text if the server does not."""
    task: "asyncio.Task[None] | None" = None
    timer: Timer | None = None
    first_token_at: float = 0.0
    completion_tokens: int = 0
    is_over: bool = False
    held: str = ""
    """Text without its own token, for the next piece."""
    finish: Finish | None = None
    """The server's end of the text, None until then; later events concern only the end."""

    @property
    def left_tokens(self) -> int:
        return max(0, self.sampling.max_tokens - self.completion_tokens)

    def unnamed(self, count: int) -> list[int]:
        """``count`` tokens without ids, limited to the answer's remaining tokens."""
        return [NO_TOKEN_ID] * max(0, min(count, self.left_tokens))

    def left_s(self, now: float) -> float:
        return max(0.0, self.ends_at - now)
