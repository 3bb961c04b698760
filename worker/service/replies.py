"""What the emitter's thread knows of lanes and plain requests. No method may block."""

from dataclasses import replace
from typing import Protocol

from worker.core import Job, JobFinished, JobPrompt, JobStarted, JobTokens
from worker.protocol import FinishReason
from worker.service.call import Responder


def as_shown(event: JobFinished, stopped: bool) -> JobFinished:
    """How a job ended once its text is known: the engine knows of no stop strings.

    One that ends with the last token allowed is found when the engine is through with the job.
    """
    if stopped and event.reason is FinishReason.LENGTH:
        return replace(event, reason=FinishReason.STOP)
    return event


class Reply(Protocol):
    """What goes to one client: a lane, or the answer to one plain request."""

    responder: Responder

    @property
    def ended(self) -> bool:
        """Nothing more will be sent: the emitter forgets the reply."""

    def flush(self) -> None:
        """Send what is pending, as one response. Raises ``ResponderLost``."""

    def running_jobs(self) -> list[Job]:
        """To be aborted when the client is gone."""

    def close(self) -> None:
        """End without regard to what is pending."""


class JobReply(Protocol):
    """Takes one job's events, in order."""

    @property
    def reply(self) -> Reply:
        """What they are sent with."""

    def started(self, event: JobStarted) -> None: ...

    def prompt(self, event: JobPrompt) -> None: ...

    def tokens(self, event: JobTokens) -> bool:
        """True when the text has just reached a stop string; tokens after it are ignored."""

    def paused(self) -> None: ...

    def resumed(self) -> None: ...

    def finished(self, event: JobFinished) -> None: ...
