"""Bundles the service's predictions, by which admission and dispatch decide."""

from dataclasses import dataclass

from orchestrator.prediction.feasibility import Feasibility
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.quotes import Quotes
from orchestrator.prediction.schedule import Schedule
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from protocol import Outcome

BINS = 10


@dataclass(slots=True)
class ChanceTally:
    """Counts for one class and one bin of chances."""

    given: int = 0
    met: int = 0
    chances: float = 0.0
    """Sum of the chances given; ``met`` should come out about as large."""


class Calibration:
    """Counts tasks by class and by the chance that they had when first sent to a worker: of tasks
    given 80 %, how many were in time?"""

    def __init__(self) -> None:
        self.tallies = {
            (priority, 100 * at // BINS): ChanceTally()
            for priority in Priority
            for at in range(BINS)
        }
        """Tallies by class and the least chance of a bin, in percent."""

    def ended(self, task: Task) -> None:
        ending, chance = task.ending, task.given_chance
        if chance is None or ending is None:
            return
        if ending.outcome in (Outcome.ABORTED, Outcome.FAILED):
            return
        at = min(BINS - 1, int(chance * BINS))
        tally = self.tallies[task.priority, 100 * at // BINS]
        tally.given += 1
        tally.chances += chance
        tally.met += ending.outcome is Outcome.MET


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predictor of each kind per process; later ones read earlier ones."""

    forecaster: Forecaster
    schedule: Schedule
    promises: Promises
    quotes: Quotes
    feasibility: Feasibility
    calibration: Calibration
