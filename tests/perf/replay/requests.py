"""Requests as a service records them."""

from typing import Any

from orchestrator.tasks.deadline import NO_PARTS
from orchestrator.tasks.job import PlacementMode, Priority
from orchestrator.tasks.work import Marks
from perf.sim.replay.recording import RecordedRequest
from protocol import FinishReason, OnDeadline, Outcome


def a_request(marks: Marks, **changes: Any) -> RecordedRequest:
    """A request of model ``m`` that was met, with a hundred tokens."""
    values: dict[str, Any] = {
        "id": "1",
        "tenant": "",
        "model": "m",
        "priority": Priority.INTERACTIVE,
        "deadline_at": 20.0,
        "parts": NO_PARTS,
        "on_deadline": OnDeadline.ERROR,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "max_tokens": 200,
        "min_tokens": 0,
        "is_length_stated": False,
        "placement": PlacementMode.AUTO,
        "placed_on": (),
        "left": (),
        "is_promised": False,
        "reserved_chance": None,
        "calls_left": 0.0,
        "between_calls_ms": 0.0,
        "is_sample": False,
        "tokens": 100,
        "marks": marks,
        "instance": "a",
        "pauses": (),
        "outcome": Outcome.MET,
        "reason": FinishReason.STOP,
    }
    return RecordedRequest(**values | changes)
