"""Lanes and plain requests as the emitter's thread sees them. No method may block."""

from dataclasses import replace
from typing import Protocol

from protocol import FinishReason
from worker.core import Job, JobFinished, JobPrompt, JobStarted, JobTokens
from worker.service.call import Responder


def as_shown(event: JobFinished, stopped: bool) -> JobFinished:
    """How a job ended, with its text known: the engine does not know stop strings.

    A stop string that ends with the last token allowed is found after the engine has ended the job.
    """
    if stopped and event.reason is FinishReason.LENGTH:
        return replace(event, reason=FinishReason.STOP)
    return event


class Reply(Protocol):
    """Everything sent to one client: a lane, or the answer to one plain request."""

    responder: Responder

    @property
    def ended(self) -> bool:
        """Whether nothing more will be sent, so that the emitter forgets the reply."""

    def flush(self) -> None:
        """Send what is pending, as one response. Raises ``ResponderLost``."""

    def running_jobs(self) -> list[Job]:
        """Jobs to abort when the client is gone."""

    def close(self) -> None:
        """End the reply, and drop what is pending."""


class JobReply(Protocol):
    """Takes one job's events, in order."""

    @property
    def reply(self) -> Reply:
        """The reply by which the events are sent."""

    def started(self, event: JobStarted) -> None: ...

    def prompt(self, event: JobPrompt) -> None: ...

    def tokens(self, event: JobTokens) -> bool:
        """True when the text has just reached a stop string; tokens after it are ignored."""

    def paused(self) -> None: ...

    def resumed(self) -> None: ...

    def finished(self, event: JobFinished) -> None: ...
