"""The page's clips in a real Chromium, in front of a slot model that does what each test needs."""

import io
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.clips.api.test_slots import serving
from tests.orchestrator.api.page.conftest import ended, set_deadline
from tests.orchestrator.conftest import MakeService, Service
from tests.support import fake_slots
from tests.support.browser import CHROMIUM, Tab, open_tab
from tests.support.fake_slots import FakeClips, FakePlan
from tests.support.fake_worker import FakeWorker

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")

KEY = "a-key-that-nobody-guesses"


@pytest.fixture
async def fake(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> FakeClips:
    """With a clip of two seconds that a browser can show."""
    av = pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("h264", rate=12)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(24):
            grey = np.full((32, 32, 3), 200, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey)))
        file.mux(stream.encode())
    monkeypatch.setitem(fake_slots.FILES, "mp4", data.getvalue())
    worker.slots = FakeClips()
    return worker.slots


def complaints(tab: Tab, service: Service) -> list[str]:
    """Of the browser, which reports each answer of 4xx and 5xx, too; not those of earlier pages."""
    said = [line for line in tab.console if service.url in line or "127.0.0.1" not in line]
    return [line.partition("a status of ")[2] or line for line in said]


PERCENTS = (
    "[...document.querySelectorAll('#clip-stages [role=progressbar]')].map(e => e.ariaValueNow)"
)


async def test_a_clip_is_watched_while_it_is_made_and_then_played(
    devtools: str, fake: FakeClips, worker: FakeWorker, make_service: MakeService
) -> None:
    service = await serving(await make_service(worker, token=KEY, slots__serve=True))
    plan = fake.does(FakePlan(hold_at="clip", given_up=("half the frames a second",)))
    async with open_tab(devtools, service.url) as tab:
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.type(KEY)
        await tab.press("Enter")
        await tab.until("!document.querySelector('#clips-link').hidden")
        await tab.click("#clips-link")
        assert await tab.js("document.querySelector('#clips-absent').hidden")
        await set_deadline(tab, 600, "#clip-deadline-s")
        await tab.click("#clip-send")
        await tab.until(f"{PERCENTS}.join() === '100,100,100,0'")
        assert await tab.text("#clip-verdict") == "Rendering …"
        assert "left" in await tab.text("#clip-figures")
        plan.release.set()
        assert await ended(tab, "#clip-verdict") == "partial"
        assert await tab.text("#clip-verdict") == "Rendered, with less"
        assert "half the frames a second" in await tab.text("#clip-reason")
        assert "to spare" in await tab.text("#clip-figures")
        assert "2.0 s" in await tab.text("#clip-facts")
        names = await tab.js(
            "[...document.querySelectorAll('#clip-files button')].map(e => e.innerText)"
        )
        assert names == ["Save clip.mp4", "Save speech.wav", "Save portrait.png"]
        video = "document.querySelector('#clip-video')"
        await tab.until(f"!{video}.hidden")
        if await tab.js(f"{video}.canPlayType('video/mp4; codecs=\"avc1.42E01E\"') !== ''"):
            assert await tab.until(f"{video}.videoWidth") == 32
            assert 1.9 < await tab.until(f"{video}.duration") < 2.3
        # What it was sent as, and what the board makes of the instance.
        (call,) = fake.calls
        assert call.recipe["text"].startswith("Good morning") and call.recipe["check"]["enabled"]
        assert (
            call.recipe["portrait"]["seed"] == 5 and "red hair" in call.recipe["portrait"]["prompt"]
        )
        assert call.parameters["on_deadline"] == "degrade"
        await tab.press("2")
        await tab.until("document.querySelector('#instances').innerText.includes('clip memory')")
        # Twice where the service was slow to say how it is, and was asked again.
        assert set(complaints(tab, service)) == {f"401 (Unauthorized) {service.url}/v1/models"}
        assert not any(KEY in request["url"] for request in tab.requests)
        urls = [request["url"] for request in tab.requests]
        hosts = {urlsplit(url).netloc for url in urls if url.startswith("http")}
        assert hosts == {urlsplit(service.url).netloc}


async def test_an_instance_that_renders_clips_alone_is_well(
    devtools: str, fake: FakeClips, worker: FakeWorker, make_service: MakeService
) -> None:
    """It serves no text, and is neither red on the board nor counted as an instance for text."""
    worker.is_slots_only = True
    service = await serving(await make_service(worker, slots__serve=True, wait=False))
    async with open_tab(devtools, f"{service.url}/#board") as tab:
        await tab.until("document.querySelector('.instance .state')?.textContent === 'clips'")
        state = await tab.js("document.querySelector('.instance .state').dataset.state")
        assert state == "ready"
        assert "unknown model" not in await tab.text(".instance")
    assert not service.metric("tidegate_instance_slots", instance=worker.address)
