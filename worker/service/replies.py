"""What the emitter's thread knows of lanes and plain requests. No method may block."""

from dataclasses import replace
from typing import Protocol

from worker.core import Job, JobFinished, JobStarted, JobTokens
from worker.protocol import FinishReason
from worker.service.call import Responder


def as_shown(event: JobFinished, stopped: bool) -> JobFinished:
    """How a job ended once its text is known: the engine knows of no stop strings.

    One that ends with the last token allowed is found when the engine is through with the job.
    """
    if stopped and event.reason is FinishReason.LENGTH:
        return replace(event, reason=FinishReason.STOP)
    return event


class Outlet(Protocol):
    """Something with a client at its end: a lane, or one plain request."""

    responder: Responder

    @property
    def ended(self) -> bool:
        """Nothing more will be sent: the emitter forgets the outlet."""

    def flush(self) -> None:
        """Send what is pending, as one response. Raises ``ResponderLost``."""

    def jobs(self) -> list[Job]:
        """Jobs that run for this outlet, to be aborted when its client is gone."""

    def close(self) -> None:
        """End without regard to what is pending."""


class Route(Protocol):
    """Takes one job's events, in order, for its outlet."""

    @property
    def outlet(self) -> Outlet: ...

    def started(self, event: JobStarted) -> None: ...

    def tokens(self, event: JobTokens) -> bool:
        """True when the text has just reached a stop string; tokens after it are ignored."""

    def paused(self) -> None: ...

    def resumed(self) -> None: ...

    def finished(self, event: JobFinished) -> None: ...
