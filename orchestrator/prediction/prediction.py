"""The service's predictions, in one hand: what admission and dispatch go by."""

from dataclasses import dataclass

from orchestrator.prediction.calibration import Calibration
from orchestrator.prediction.feasibility import Feasibility
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.start_times import StartTimes


@dataclass(frozen=True, slots=True)
class Prediction:
    """One of each per process; they read each other in this order."""

    forecaster: Forecaster
    start_times: StartTimes
    promises: Promises
    feasibility: Feasibility
    calibration: Calibration
