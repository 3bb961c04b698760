"""A request as a dialect would read it, in as many words as a test needs."""

from typing import Any

from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Api, Job
from protocol import Sampling


def make_job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "api": Api.NATIVE,
        "model": "m",
        "sampling": Sampling(max_tokens=8),
        "max_tokens": 8,
        "deadline": Deadline(1000.0, 0),
        "correlation_id": "c",
        "arrived": 100.0,
    }
    return Job(**(values | changes))
