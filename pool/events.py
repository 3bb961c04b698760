"""Events of the units' supervisors: ``tidegate up`` and the pool's manager. Log lines use the
sentences of ``orchestrator.telemetry.narration``.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum

pool_log = logging.getLogger("orchestrator.pool")


class EventKind(StrEnum):
    """Kinds of events: for any unit, for a launch, for a pool."""

    READY = "ready"
    LOST = "lost"
    WARNED = "warned"

    FETCHING = "fetching"
    FOUND = "found"
    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"
    ENDED = "ended"

    FITS = "fits"
    SPAWNED = "spawned"
    ADOPTED = "adopted"
    FAILED = "failed"
    REPLACING = "replacing"
    KEPT = "kept"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CHANGED = "changed"
    REFUSED_FILE = "refused_file"
    UNREGISTERED = "unregistered"


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One event. ``target`` is a unit, or its pool or launch. ``text`` is the program that is
    downloaded or was found, an address, a reason, or a warning.

    ``seconds``: duration of the step; for a unit that was lost or failed, the pause before the next
    start.
    """

    kind: EventKind
    target: str
    text: str = ""
    seconds: float = 0.0
