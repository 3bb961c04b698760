"""Predicts what work will take, and judges what is worth doing now.

- ``step_model``     what an engine step takes, and work in such steps: pure, frozen
- ``step_learner``   fits it to a worker's totals
- ``quantiles``      over a sliding window
- ``answer_length``  how long answers get
- ``urgency``        what a deadline makes of that
- ``forecaster``     these together, for a task: its times, and its place in the queue
- ``forecast``       plays a schedule forward: pure
- ``schedule``       the schedule as it is now: chances, starts, ends
- ``promises``       deadlines that were named to clients, and what keeping them takes
- ``quotes``         the chance by deadline before a request is sent, and reservations
- ``feasibility``    what will not be met: refuse, observe, sample
"""

from orchestrator.prediction.answer_length import AnswerLengths, LengthCurve, LengthKey
from orchestrator.prediction.quantiles import Quantiles
from orchestrator.prediction.step_learner import LEARNT_STEPS, StepLearner
from orchestrator.prediction.step_model import IDLE, Load, StepModel, StepUnderLoad, Work
from orchestrator.prediction.urgency import Costs, Due, Urgency, urgency

__all__ = [
    "IDLE",
    "LEARNT_STEPS",
    "AnswerLengths",
    "Costs",
    "Due",
    "LengthCurve",
    "LengthKey",
    "Load",
    "Quantiles",
    "StepLearner",
    "StepModel",
    "StepUnderLoad",
    "Urgency",
    "Work",
    "urgency",
]
