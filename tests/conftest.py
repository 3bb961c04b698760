"""In which order test files run: those that mostly wait beside those that mostly compute."""

from itertools import groupby
from pathlib import Path

import pytest

WAITING = Path(__file__).parent / "e2e"
FIRST = ("test_sim.py", "test_sim_conservation.py", "test_gpu.py", "test_triton_interpreted.py")
"""What computes longest: it must not be left to the end, with nothing beside it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of ``e2e`` are spread evenly among the others; the tests of a file stay together."""
    files = [(path, list(group)) for path, group in groupby(items, key=lambda item: item.path)]
    waiting = [tests for path, tests in files if WAITING in path.parents]
    computing = sorted(
        ((path, tests) for path, tests in files if WAITING not in path.parents),
        key=lambda file: file[0].name not in FIRST,
    )
    order: list[list[pytest.Item]] = []
    every = max(1, len(computing) // (len(waiting) + 2))
    for number, (_, tests) in enumerate(computing):
        if waiting and number % every == 0:
            order.append(waiting.pop(0))
        order.append(tests)
    items[:] = [item for tests in [*order, *waiting] for item in tests]
