"""A real Chromium without a window, driven over its DevTools protocol: no driver to install."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
"""Empty where there is none."""
START_S = 60.0
WAIT_S = 60.0
_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    # One renderer for one page after the other.
    "--disable-features=BackForwardCache,IsolateOrigins,MediaRouter,OptimizationHints,"
    "ProcessPerSiteUpToMainFrameThreshold,SpareRendererForSitePerProcess,Translate,site-per-process",
    "--disable-site-isolation-trials",
    "--renderer-process-limit=1",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-proxy-server",
    "--mute-audio",
    "--remote-debugging-port=0",
)
_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
}
CTRL = 2


@contextmanager
def chromium() -> Iterator[str]:
    """Start one; yields the address of its DevTools. It and its profile are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # it does not start as root with it
        process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _devtools(process, Path(profile) / "DevToolsActivePort")
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with suppress(ProcessLookupError):  # helpers of its own that still write to its profile
                os.killpg(process.pid, signal.SIGKILL)


def _devtools(process: subprocess.Popen[bytes], file: Path) -> str:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        assert process.poll() is None, "Chromium ended while it started"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.02)
    raise AssertionError(f"Chromium did not start within {START_S} s")


class Tab:
    """The browser's one tab, for as long as one test has it.

    A renderer of its own for each would cost a second of CPU. What a page stores is its origin's,
    and each test's service has another port.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.requests: list[dict[str, Any]] = []
        """Every request that the page made: ``url``, ``method``, ``headers``."""
        self.console: list[str] = []
        """What the page or the browser complained of: errors, warnings, uncaught exceptions."""
        self._loaded = asyncio.Event()

    async def open(self, url: str) -> None:
        targets = (await self._send("Target.getTargets"))["targetInfos"]
        (target,) = (each["targetId"] for each in targets if each["type"] == "page")
        attached = await self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send(f"{domain}.enable")
        size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self._send("Emulation.setDeviceMetricsOverride", **size)
        # Nothing moves while nothing happens: drawing without a GPU is dear.
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await self._send("Emulation.setEmulatedMedia", features=[still])
        await self.goto(url)

    async def goto(self, url: str) -> None:
        self._loaded.clear()
        await self._send("Page.navigate", url=url)
        async with asyncio.timeout(WAIT_S):
            await self._loaded.wait()

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = await self._send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until an expression in the page is true; its value."""
        poll = (
            "new Promise(done => { const look = () => { const value = "
            f"({condition}); value ? done(value) : setTimeout(look, 40) }}; look() }})"
        )
        try:
            async with asyncio.timeout(WAIT_S):
                return await self.js(poll)
        except TimeoutError:
            seen = await self.js("document.body.innerText")
            raise AssertionError(f"never came true: {condition}\n\n{seen}") from None

    async def text(self, selector: str) -> str:
        found = await self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(found, str)
        return found

    async def click(self, selector: str) -> None:
        """With the mouse, where the element is once the page stands still: nothing may lie over
        it."""
        x, y = await self.until(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            " const at = [b.x + b.width / 2, b.y + b.height / 2], before = e.seenAt; e.seenAt = at;"
            " return `${before}` === `${at}` && e.contains(document.elementFromPoint(...at)) && at"
            f" }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self._send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def type(self, text: str) -> None:
        """Into whatever has the focus."""
        await self._send("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        if key in _KEYS:
            code, number, text = _KEYS[key]
        else:
            code, number, text = "", ord(key.upper()), "" if modifiers & CTRL else key
        base = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        down = "keyDown" if text else "rawKeyDown"
        extra = {"text": text} if text else {}
        await self._send("Input.dispatchKeyEvent", type=down, **base, **extra)
        await self._send("Input.dispatchKeyEvent", type="keyUp", **base)

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    async def _send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        await self._socket.send_json(message)
        return await future

    async def read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                future = self._answers.pop(said["id"])
                if future.done():
                    continue
                if "error" in said:
                    future.set_exception(AssertionError(said["error"]["message"]))
                else:
                    future.set_result(said["result"])
            else:
                self._take(said["method"], said["params"])
        for future in self._answers.values():
            future.cancel()

    def _take(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.console.append(details.get("exception", {}).get("description", str(details)))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.console.append(str([a.get("value") for a in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.console.append(f"{entry['text']} {entry.get('url', '')}")


@asynccontextmanager
async def open_tab(devtools: str, url: str) -> AsyncIterator[Tab]:
    """The tab, at an address."""
    async with aiohttp.ClientSession() as http, http.ws_connect(devtools, max_msg_size=0) as socket:
        tab = Tab(socket)
        reading = asyncio.create_task(tab.read())
        try:
            await tab.open(url)
            yield tab
            await tab.goto("about:blank")  # what the page has open is closed
        finally:
            await socket.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
