"""Step models and machines of which a test names only what matters to it."""

from typing import Any

from orchestrator.prediction.forecast import Machine
from orchestrator.prediction.step_model import StepModel

_NOTHING: dict[str, Any] = {"bends": (), "spread": 0.0, "context_token_ms": 0.0}
_OF_STEPS = ("prompt_tokens_per_step", "fastest_ms", "tokens_per_s", "steps", "doubt")


def pace_of(*costs: float, **known: Any) -> StepModel:
    """A step model; of what is not among ``costs`` (its first five) or ``known`` nothing is."""
    unknown = _NOTHING | dict.fromkeys((*_OF_STEPS, "context_per_row"), 0)
    return StepModel(*costs, **(unknown | known))  # type: ignore[arg-type]


KNOWN = pace_of(64, 512, 9.9, 0.1, 0.1, fastest_ms=10.0, steps=1000)
"""10 ms a token for one, 16 ms with all 64 slots in use; never less than 10 ms so far."""


def machine_of(base_ms: float, row_ms: float, rows: int, **more: Any) -> Machine:
    """One instance, without anything else."""
    alone = _NOTHING | {"instances": 1, "usual": 0, "beside": 0}
    return Machine(base_ms, row_ms, rows, **(alone | more))
