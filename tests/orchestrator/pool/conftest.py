"""Fixtures of the launcher's tests."""

import pytest


@pytest.fixture
def no_blocking() -> None:
    """Replaces the orchestrator's rule: no client waits on the launcher's loop, which opens log
    files and reads /proc as it goes."""
