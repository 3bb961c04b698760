"""What work will take, and what is worth doing now.

``step_model`` and ``step_learner`` know how fast instances are, ``answer_length`` how long answers
get, ``urgency`` what that means for a deadline, and ``forecaster`` puts these together for a task.
"""

from orchestrator.prediction.answer_length import AnswerLengths, LengthCurve, LengthKey
from orchestrator.prediction.quantiles import Quantiles
from orchestrator.prediction.step_learner import LEARNT_STEPS, StepLearner
from orchestrator.prediction.step_model import IDLE, Estimate, Load, StepModel, StepUnderLoad, Work
from orchestrator.prediction.urgency import Costs, Due, Urgency, urgency

__all__ = [
    "IDLE",
    "LEARNT_STEPS",
    "AnswerLengths",
    "Costs",
    "Due",
    "Estimate",
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
