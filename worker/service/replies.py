"""Interfaces of lanes and plain requests for the emitter's thread. No method may block."""

from dataclasses import replace
from typing import Protocol

from protocol import FinishReason
from worker.core import Job, JobFinished, JobPrompt, JobStarted, JobTokens
from worker.service.call import Responder


def as_shown(event: JobFinished, stopped: bool) -> JobFinished:
    """How a job ended, given its text: the engine does not know stop strings.

    If a stop string ends with the last allowed token, it is found after the engine ended the job.
    """
    if stopped and event.reason is FinishReason.LENGTH:
        return replace(event, reason=FinishReason.STOP)
    return event


class Reply(Protocol):
    """Everything sent to one client: a lane, or the answer to one plain request."""

    responder: Responder

    @property
    def ended(self) -> bool:
        """Whether nothing more will be sent, so that the emitter can drop the reply."""

    def flush(self) -> None:
        """Send what is pending, as one response. Raises ``ResponderLost``."""

    def running_jobs(self) -> list[Job]:
        """Jobs to abort if the client disconnects."""

    def close(self) -> None:
        """End the reply and drop pending data."""


class JobReply(Protocol):
    """Takes one job's events, in order."""

    @property
    def reply(self) -> Reply:
        """The reply that sends the events."""

    def started(self, event: JobStarted) -> None: ...

    def prompt(self, event: JobPrompt) -> None: ...

    def tokens(self, event: JobTokens) -> bool:
        """Take tokens. True if the text just reached a stop string; later tokens are ignored."""

    def paused(self) -> None: ...

    def resumed(self) -> None: ...

    def finished(self, event: JobFinished) -> None: ...
