"""Logs events as sentences for people (OR-15): one per event, never one per token. The sentences
are constant, so they never have an id, a secret or a client's text. Each fits on one line. The
fields ``actor``, ``action`` and ``target`` say who did what to which object. Events of a request
also have its correlation id.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

from orchestrator.telemetry.log import Field, fields
from protocol import AbortCause, Code, Outcome, SwapPhase

MAX_CHARS = 100


class Actor(StrEnum):
    """The cause of an event."""

    CLIENT = "client"
    LAUNCHER = "launcher"
    OPERATOR = "operator"
    ORCHESTRATOR = "orchestrator"
    POOL = "pool"
    WORKER = "worker"


class Action(StrEnum):
    """Kinds of events, as verbs."""

    PREFLIGHT = "preflight"
    BUILD = "build"
    SPAWN = "spawn"
    LOAD = "load"
    LOSE = "lose"
    DEGRADE = "degrade"
    READY = "ready"
    STOP = "stop"
    PLACE = "place"
    RETRY = "retry"
    ANSWER = "answer"
    CUT = "cut"
    MISS = "miss"
    REFUSE = "refuse"
    ABORT = "abort"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Narration:
    """An event to log. ``sentence`` is for people; the other fields are for searches."""

    actor: Actor
    action: Action
    sentence: str


def narrate(
    log: logging.Logger,
    told: Narration,
    target: str,
    level: int = logging.INFO,
    /,
    **more: Field,
) -> None:
    """Log an event. ``target`` is the affected instance, model or unit."""
    if log.isEnabledFor(level):
        log.log(level, "%s", told.sentence, extra=fields(**narrated(told, target), **more))


def narrated(told: Narration, target: str) -> dict[str, Field]:
    return {"actor": told.actor.value, "action": told.action.value, "target": target or None}


_by_worker, _by_us, _by_client = (
    partial(Narration, actor) for actor in (Actor.WORKER, Actor.ORCHESTRATOR, Actor.CLIENT)
)
K = TypeVar("K")


def _by(actor: Actor, events: Mapping[K, tuple[Action, str]]) -> dict[K, Narration]:
    return {name: Narration(actor, *told) for name, told in events.items()}


# ── instances, and the service as a whole ────────────────────────────────────────────────────────

INSTANCE_STATES = _by(
    Actor.WORKER,
    {
        "absent": (
            Action.READY,
            "An instance has no text model: clips at most are rendered there.",
        ),
        "connecting": (Action.LOSE, "An instance cannot be used now, and is being connected to."),
        "up": (Action.READY, "An instance is ready: its model is loaded and its lanes are open."),
        "suspect": (
            Action.LOSE,
            "An instance is suspect: it, or its engine, has been silent for too long.",
        ),
        "down": (Action.LOSE, "An instance is down: it has been silent for far too long."),
    },
)
"""By ``InstanceState``."""
INSTANCE_LACKS = _by_worker(
    Action.DEGRADE,
    "An instance's engine cannot do all that others can: what needs it goes elsewhere.",
)
SWAPS = _by(
    Actor.WORKER,
    {
        SwapPhase.LOAD: (Action.LOAD, "An instance is loading another model."),
        SwapPhase.DRAIN: (
            Action.STOP,
            "An instance takes no new work: its model is about to be replaced.",
        ),
        SwapPhase.RESTORE: (
            Action.LOAD,
            "An instance could not load its new model, and loads the old one.",
        ),
        SwapPhase.DONE: (Action.READY, "An instance serves another model now."),
        SwapPhase.FAILED: (Action.FAIL, "An instance could not be given another model."),
    },
)
ON_DEMAND = _by_us(Action.LOAD, "A model is asked for that no instance serves, so one loads it.")
READINESS = _by(
    Actor.ORCHESTRATOR,
    {
        "ready": (Action.READY, "The service is ready for work."),
        "not_ready": (Action.READY, "The service is not ready: no instance is up."),
        "draining": (Action.READY, "The service is draining: new work is refused."),
        "degraded": (
            Action.DEGRADE,
            "The service is degraded: no durable tasks, for the journal cannot be written.",
        ),
        "near_exhaustion": (
            Action.READY,
            "The service is near exhaustion: its queue is almost full.",
        ),
        "exhausted": (Action.READY, "The service is not ready: its queue is full."),
    },
)

# ── the launcher ─────────────────────────────────────────────────────────────────────────────────

LAUNCH = _by(
    Actor.LAUNCHER,
    {
        "fetching": (Action.BUILD, "This machine has no Triton server, so one is being fetched."),
        "found": (Action.PREFLIGHT, "This machine has a Triton server that fits."),
        "starting": (Action.SPAWN, "A unit of the service is starting."),
        "ready": (Action.LOAD, "A unit of the service has loaded what it needs and serves."),
        "lost": (Action.LOSE, "A unit of the service was lost and is started again."),
        "warned": (Action.DEGRADE, "Something is missing, and the service continues without it."),
        "serving": (Action.READY, "The service serves."),
        "ending": (Action.STOP, "The service is ending."),
        "ended": (Action.STOP, "The service has ended and left nothing."),
    },
)
"""Events of the launcher, by ``PoolEvent.kind``."""

# ── the pool manager ─────────────────────────────────────────────────────────────────────────────

POOL = _by(
    Actor.POOL,
    {
        "fits": (Action.PREFLIGHT, "An instance has its model, and its memory and ports are free."),
        "spawned": (Action.SPAWN, "An instance was started and is loading its model."),
        "adopted": (Action.READY, "An instance that an earlier manager started keeps running."),
        "ready": (Action.LOAD, "An instance has loaded its model and serves."),
        "lost": (Action.LOSE, "An instance was lost and is started again."),
        "failed": (Action.LOSE, "An instance could not start, and is tried again later."),
        "replacing": (Action.SPAWN, "An instance is being replaced."),
        "kept": (Action.FAIL, "The replacement of an instance failed, and the old one stays."),
        "stopping": (Action.STOP, "An instance is drained: what runs there may end."),
        "stopped": (Action.STOP, "An instance has ended and left nothing."),
        "changed": (Action.PREFLIGHT, "The pool is brought in line with what its file asks for."),
        "refused_file": (Action.REFUSE, "The pool's file does not fit, so nothing is changed."),
        "unregistered": (
            Action.DEGRADE,
            "An orchestrator cannot be updated with the ready instances.",
        ),
        "warned": (Action.DEGRADE, "Something is missing, and the pool continues without it."),
    },
)
"""Events of a pool manager, by the kind of the ``PoolEvent``."""

# ── requests ─────────────────────────────────────────────────────────────────────────────────────

PLACED = _by_us(Action.PLACE, "A request goes to the instance that should finish it first.")
PLACED_BY_PREFIX = _by_us(Action.PLACE, "A request goes where some of its prompt is cached.")
PLACED_BY_SESSION = _by_us(Action.PLACE, "A request goes where its conversation was.")
RETRIED = _by_us(Action.RETRY, "A request is tried again: its instance did not finish it.")
DISCONNECTED = _by_client(Action.ABORT, "A client disconnected before its answer ended.")
TOO_SLOW = _by_us(Action.ABORT, "A client was disconnected: it read too slowly.")
_ENDINGS = {
    Outcome.MET: _by_us(Action.ANSWER, "A request was answered in time."),
    Outcome.PARTIAL: _by_us(Action.CUT, "A request was cut at its deadline, as its client asked."),
    Outcome.MISSED: _by_us(Action.MISS, "A request was not answered by its deadline."),
    Outcome.REFUSED: _by_us(Action.REFUSE, "A request was refused."),
    Outcome.ABORTED: _by_client(Action.ABORT, "A request was cancelled before it was answered."),
    Outcome.FAILED: _by_us(Action.FAIL, "A request failed."),
}
_GONE = _by_client(Action.ABORT, "A request was stopped: its client is gone.")
_REFUSALS: dict[Code | None, Narration] = {
    code: _by_us(Action.REFUSE, f"A request was refused: {why}.")
    for code, why in (
        (Code.INVALID_REQUEST, "the request is not valid"),
        (Code.CONTEXT_OVERFLOW, "it does not fit into the model's context"),
        (Code.MODEL_NOT_FOUND, "no instance serves its model"),
        (Code.DEADLINE_EXCEEDED, "too little time was left until its deadline"),
        (Code.DEADLINE_INFEASIBLE, "it was certain to miss its deadline"),
        (Code.RATE_LIMITED, "its key is at its limit"),
        (Code.QUEUE_FULL, "the queue is full"),
        (Code.NO_CAPACITY, "no instance can take it"),
        (Code.NOT_READY, "no instance is ready"),
        (Code.DRAINING, "the service is shutting down"),
    )
}
_FAILURES: dict[Code | None, Narration] = {
    Code.INSTANCE_LOST: _by_worker(Action.FAIL, "A request failed: its instance was lost."),
    Code.ENGINE_ERROR: _by_worker(Action.FAIL, "A request failed: its worker did."),
    Code.NOT_FINITE: _by_worker(
        Action.FAIL, "A request failed: its model's numbers were not finite."
    ),
    Code.POISON_REQUEST: _by_us(
        Action.FAIL, "A request failed: two workers died while they had it."
    ),
    Code.DRAINING: _by_us(Action.FAIL, "A request failed: the service went down."),
}


def of_ending(outcome: Outcome, code: Code | None, cause: AbortCause | None) -> Narration:
    if outcome is Outcome.ABORTED and cause is AbortCause.DISCONNECT:
        return _GONE
    by_code = {Outcome.REFUSED: _REFUSALS, Outcome.FAILED: _FAILURES}.get(outcome, {})
    return by_code.get(code, _ENDINGS[outcome])
