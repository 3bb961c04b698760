"""A real browser, where the machine has one."""

from collections.abc import Iterator

import pytest

from tests.support.browser import CHROMIUM, Tab, chromium


@pytest.fixture(scope="session")
def devtools() -> Iterator[str]:
    """The address of one Chromium's DevTools, for all tests that open a tab."""
    if not CHROMIUM:
        pytest.skip("needs Chromium: apt-get install chromium")
    with chromium() as address:
        yield address


async def set_deadline(tab: Tab, seconds: float, field: str = "#deadline-s") -> None:
    """As if it had been typed; what the form says by itself is little for a busy machine."""
    await tab.js(
        f"(e => {{ e.value = {seconds}; e.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
        f"(document.querySelector('{field}'))"
    )


async def ended(tab: Tab, verdict: str = "#verdict") -> str:
    """Wait for the verdict; its kind."""
    kind = f"document.querySelector('{verdict}').dataset.kind"
    return str(await tab.until(f"{kind} !== 'live' && {kind}"))
