"""The page in a real Chromium, in front of a worker that does what each test needs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.orchestrator.api.page.conftest import ended, set_deadline
from tests.orchestrator.conftest import MakeService, Service
from tests.support.browser import CHROMIUM, CTRL, Tab, open_tab
from tests.support.fake_worker import FakeWorker, Plan

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")

KEY = "a-key-that-nobody-guesses"


@asynccontextmanager
async def page(devtools: str, service: Service, path: str = "/") -> AsyncIterator[Tab]:
    """The page in a tab, once it knows the models; nothing it does may trouble a browser."""
    async with open_tab(devtools, f"{service.url}{path}") as tab:
        await tab.until("document.querySelector('#model').options.length")
        await set_deadline(tab, 300)
        yield tab
        assert tab.console == []
        hosts = {urlsplit(request["url"]).netloc for request in tab.requests}
        assert hosts == {urlsplit(service.url).netloc}


async def test_send_and_watch_the_tokens_come(
    devtools: str, service: Service, worker: FakeWorker
) -> None:
    plan = worker.does(Plan(stall_at=3))
    async with page(devtools, service) as tab:
        await tab.click("#send")
        await tab.until("document.querySelector('#text').innerText === 'w0 w1 w2 '")
        assert await tab.text("#verdict") == "Running …"
        assert "left" in await tab.text("#verdict-figures")
        plan.release.set()
        assert await ended(tab) == "met"
        assert (await tab.text("#text")).startswith("w0 w1 w2 w3 ")
        assert "to spare" in await tab.text("#verdict-figures")
        bar = await tab.js("document.querySelector('#answer-bar .track').ariaLabel")
        assert "left of 300 s" in bar
        assert await tab.js("document.querySelectorAll('#history li').length") == 1
        # More than a browser has connections: the rest is asked about instead.
        await tab.js("document.querySelector('#copies').value = 8")
        await tab.press("Enter", CTRL)
        await tab.until("document.querySelector('#tally').innerText === '9 met'")
        texts = "[...document.querySelectorAll('#history li')].map(row => row.innerText)"
        assert all("160 tokens" in text for text in await tab.js(texts))
    assert worker.submits[0].sampling.max_tokens == 160
    assert service.outcomes() == ["met"] * 9


async def test_cancel_stops_it_at_the_worker(
    devtools: str, service: Service, worker: FakeWorker
) -> None:
    worker.does(Plan(stall_at=2))
    async with page(devtools, service) as tab:
        await tab.click("#send")
        await tab.until("document.querySelector('#text').innerText.length")
        await tab.click("#cancel")
        assert await ended(tab) == "aborted"
        assert await tab.js("document.querySelector('#cancel').disabled")
        assert await tab.text("#text") == "w0 w1 "
    await worker.until(lambda: not worker.running)
    assert service.outcomes() == ["aborted"]


async def test_a_refusal_says_why_and_what_would_do(
    devtools: str, service: Service, worker: FakeWorker
) -> None:
    service.hold_pace()
    async with page(devtools, service) as tab:
        await tab.js("document.querySelector('#max-tokens').value = 400")
        await tab.click("#exactly")
        await set_deadline(tab, 2)
        await tab.click("#send")
        assert await ended(tab) == "refused"
        reason = await tab.text("#reason")
        assert "needs at least" in reason  # the service's own words
        assert "deadline_infeasible" in reason
        assert worker.submits == []
        await tab.click("#reason button")
        assert await ended(tab) == "met"
        # A browser reports each answer of 4xx and 5xx, whatever the page makes of it.
        tab.console = [line for line in tab.console if "504" not in line]
    assert service.outcomes() == ["refused", "met"]


@pytest.mark.slow
async def test_by_keyboard_alone(devtools: str, service: Service, worker: FakeWorker) -> None:
    worker.does(Plan(stall_at=1))
    async with page(devtools, service) as tab:
        await tab.press("/")
        assert await tab.js("document.activeElement.id") == "prompt"
        await tab.press("a", CTRL)
        await tab.type("Say 1/2 t d")  # letters that would be shortcuts elsewhere
        await tab.press("Tab")
        await tab.press("Tab")
        assert await tab.js("document.activeElement.id") == "deadline"
        before = await tab.js("document.activeElement.ariaValueText")
        await tab.press("ArrowLeft")
        assert await tab.js("document.activeElement.ariaValueText") != before
        await tab.press("Enter", CTRL)
        await tab.until("document.querySelector('#text').innerText.length")
        await tab.press("Escape")
        assert await ended(tab) == "aborted"
        await tab.press("2")
        await tab.until("!document.querySelector('#board').hidden")
        await tab.until("document.querySelector('#slack svg')")
        await tab.until("document.querySelector('#requests canvas')")
        await tab.press("1")
        await tab.until("!document.querySelector('#play').hidden")
        await tab.press("t")
        assert await tab.js("document.documentElement.dataset.theme") == "light"
        await tab.press("?")
        assert await tab.js("document.querySelector('#help-dialog').open")
        await tab.press("Escape")
        await tab.until("!document.querySelector('#help-dialog').open")
    assert service.outcomes() == ["aborted"]
    # The fake's tokenizer has a token per byte, and four special ones around a chat of one turn.
    assert len(worker.submits[0].token_ids) == len("Say 1/2 t d") + 4


async def test_a_key_is_asked_for_and_kept_in_the_tab(
    devtools: str, worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, token=KEY)
    async with open_tab(devtools, service.url) as tab:
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.press("Escape")
        await tab.until("!document.querySelector('#key-dialog').open")
        await tab.click("#key-button")  # it does not ask again by itself
        await tab.type("not this one")
        await tab.press("Enter")
        await tab.until("document.querySelector('#key-why').innerText.includes('is not valid')")
        await tab.type(KEY)
        await tab.press("Enter")
        await tab.until("document.querySelector('#model').options.length")
        assert not await tab.js("document.querySelector('#key-dialog').open")
        await set_deadline(tab, 300)
        await tab.click("#send")
        assert await ended(tab) == "met"
        assert await tab.js("sessionStorage.getItem('tidegate.key')") == KEY
        assert await tab.js("Object.values(localStorage).join() + document.cookie") == ""
        assert not any(KEY in request["url"] for request in tab.requests)
