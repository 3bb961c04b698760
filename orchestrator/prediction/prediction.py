"""Bundles the service's predictions, by which admission and dispatch decide."""

from dataclasses import dataclass

from orchestrator.prediction.feasibility import Feasibility
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.quotes import Quotes
from orchestrator.prediction.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predictor of each kind per process; later ones read earlier ones."""

    forecaster: Forecaster
    schedule: Schedule
    promises: Promises
    quotes: Quotes
    feasibility: Feasibility
