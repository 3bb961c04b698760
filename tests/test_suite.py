"""What holds for the whole suite, on whatever machine it runs."""

import pytest

from tests.conftest import LOADED


def test_the_collection_imports_no_library_that_only_some_tests_need(
    pytestconfig: pytest.Config,
) -> None:
    assert not pytestconfig.stash[LOADED], "it costs each process seconds: tests/support/lazy.py"
