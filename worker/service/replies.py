"""Interfaces of lanes and plain requests for the emitter's thread. No method may block."""

# ruff: noqa: B027 - few replies take every event

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

from protocol import FinishReason
from worker.core import Job, JobFinished, JobPrompt, JobStarted, JobTokens
from worker.service.call import Responder


def as_shown(event: JobFinished, stopped: bool) -> JobFinished:
    """How a job ended, as its client sees it: a text that was forced to end in time did not stop by
    itself, and one that is ``stopped`` has reached a stop string, even with its last token."""
    reason, constraint = event.reason, event.job.constraint
    if reason is FinishReason.STOP and constraint is not None and constraint.has_closed:
        reason = FinishReason.LENGTH
    if reason is FinishReason.LENGTH and stopped:
        reason = FinishReason.STOP
    return event if reason is event.reason else replace(event, reason=reason)


class Reply(Protocol):
    """Everything sent to one client: a lane, or the answer to one plain request."""

    responder: Responder
    ended: bool
    """Whether nothing more will be sent, so that the emitter can drop the reply."""

    def flush(self) -> None:
        """Send what is pending, as one response. Raises ``ResponderLost``."""

    def running_jobs(self) -> list[Job]:
        """Jobs to abort if the client disconnects."""

    def close(self) -> None:
        """End the reply and drop pending data."""


class JobReply(ABC):
    """Takes one job's events, in order; some do nothing unless they are overridden."""

    reply: Reply
    """The reply that sends the events."""

    @abstractmethod
    def tokens(self, event: JobTokens) -> bool:
        """Take tokens. True if the text just reached a stop string; later tokens are ignored."""

    @abstractmethod
    def finished(self, event: JobFinished) -> None: ...

    def started(self, event: JobStarted) -> None: ...

    def prompt(self, event: JobPrompt) -> None: ...

    def paused(self) -> None: ...

    def resumed(self) -> None: ...
