"""Bundles the service's predictions, by which admission and dispatch decide."""

from dataclasses import dataclass

from orchestrator.prediction.calibration import Calibration
from orchestrator.prediction.feasibility import Feasibility
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.quotes import Quotes
from orchestrator.prediction.start_times import StartTimes


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predictor of each kind per process; later ones read earlier ones."""

    forecaster: Forecaster
    start_times: StartTimes
    promises: Promises
    quotes: Quotes
    feasibility: Feasibility
    calibration: Calibration
