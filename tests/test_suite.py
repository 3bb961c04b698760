"""What holds for the whole suite, on whatever machine it runs."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import LOADED


def test_the_collection_imports_no_library_that_only_some_tests_need(
    pytestconfig: pytest.Config,
) -> None:
    assert not pytestconfig.stash[LOADED], "it costs each process seconds: tests/support/lazy.py"


def test_a_pause_of_the_machine_refutes_no_property() -> None:
    """Hypothesis calls an example that takes 200 ms a failure, unless it is told not to."""
    paused = False

    @given(st.integers())
    def holds(number: int) -> None:
        nonlocal paused
        if not paused:
            paused = True
            time.sleep(0.3)

    holds()
    assert paused
