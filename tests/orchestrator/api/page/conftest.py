"""A real browser, where the machine has one."""

from collections.abc import Iterator

import pytest

from tests.support.browser import CHROMIUM, chromium


@pytest.fixture(scope="session")
def devtools() -> Iterator[str]:
    """The address of one Chromium's DevTools, for all tests that open a tab."""
    if not CHROMIUM:
        pytest.skip("needs Chromium: apt-get install chromium")
    with chromium() as address:
        yield address
