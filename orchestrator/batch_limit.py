"""How many jobs should run at once on an instance, when some of them are pressed for time.

All jobs of an instance share its steps: the more run, the longer each step, and the longer each
answer takes. A job that would be late in company and in time with less of it is *pressed*. While
there are pressed jobs, *patient* ones, which would be in time even after a pause, stand still with
their KV kept. What has no token yet is never held up, so nobody waits longer for the first one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.flight import LaneFlight
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.step_model import StepModel
from orchestrator.registry import Instance
from orchestrator.task import Stage, Task

MOST_PAUSES = 4
"""Of one job; workers hold to it too."""
_LATE, _IN_TIME = 1.1, 0.95
"""Shares of the pace that a job needs: with more it is late, with less it is in time."""
_PATIENCE = 1.2
"""A patient job has so many times the time that it needs in full company."""
_PAUSE_MS = 200.0
"""What a pause should last at least to be worth it."""


@dataclass(slots=True)
class BatchLimit:
    """``rows`` is None where nobody is pressed; ``pause`` are jobs to pause."""

    rows: int | None = None
    pause: list[LaneFlight] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    task: Task
    flight: LaneFlight | None
    left_ms: float
    usual_tokens: float
    long_tokens: float

    @property
    def pace_ms(self) -> float:
        """Per token, so that a usual answer is in time."""
        return self.left_ms / self.usual_tokens


def batch_limit(
    instance: Instance,
    model: StepModel,
    flights: Iterable[LaneFlight],
    forecaster: Forecaster,
    now: float,
) -> BatchLimit:
    """The limit for ``instance``; ``flights`` are all of its jobs, paused ones included."""
    jobs = [_job(flight, forecaster, now) for flight in flights if _is_current(flight)]
    everybody = instance.load + instance.window.paused
    step_ms = model.step_ms(everybody) * model.mid
    alone_ms = model.step_ms(1) * model.mid
    running = [job for job in jobs if job.flight is not None and not job.flight.is_paused]
    pressed = [job for job in running if alone_ms <= job.pace_ms < step_ms * _LATE]
    if not pressed:
        return BatchLimit()
    patient = [job for job in jobs if _is_patient(job, step_ms)]
    least = everybody - len(patient)
    rows = [rows for job in pressed if (rows := _rows_within(model, job.pace_ms)) >= max(1, least)]
    if not rows:
        return BatchLimit()  # nobody would be in time for it
    target = max(1, least, min(rows))
    surplus = instance.load - target
    can_go = [job for job in patient if job in running and job.task.pauses < MOST_PAUSES]
    can_go.sort(key=lambda job: job.left_ms / job.long_tokens, reverse=True)
    chosen = [job.flight for job in can_go[: max(0, surplus)] if job.flight is not None]
    return BatchLimit(target, chosen)


def _is_current(flight: LaneFlight) -> bool:
    task = flight.task
    return task.flight is flight and task.rival is None and task.stage is Stage.RUNNING


def _job(flight: LaneFlight, forecaster: Forecaster, now: float) -> _Job:
    task = flight.task
    usual, long = forecaster.tokens_left(task)
    return _Job(task, flight, task.deadline.left_ms(now), usual, long)


def _is_patient(job: _Job, step_ms: float) -> bool:
    task = job.task
    if not task.completion_tokens or task.parts.token_gap_s < float("inf"):
        return False
    return job.left_ms - _PAUSE_MS >= _PATIENCE * job.long_tokens * step_ms


def _rows_within(model: StepModel, pace_ms: float) -> int:
    """The most rows whose steps take no longer than ``pace_ms``, a little to spare; 0 for none."""
    room_ms = _IN_TIME * pace_ms - model.step_ms(0) * model.mid
    row_ms = model.row_ms * model.mid
    if room_ms < row_ms:
        return 0
    return min(model.slots, int(room_ms / row_ms)) if row_ms > 0 else model.slots
