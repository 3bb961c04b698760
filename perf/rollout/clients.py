"""Clients that ask again and again, and know the text that they must get."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from perf.rollout.pods import TOKEN

LENGTHS: Final = (16, 96, 240)
"""Tokens of answers: at 20 ms each the longest take 5 s, less than a drain."""
_SILENT_S: Final = 30.0
_PAUSE_S: Final = 0.1
_REFUSED: Final = (429, 503)
_NEVER_THERE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors after which a request got to nobody, and may be sent to another."""


@dataclass(slots=True)
class Told:
    """What clients were told."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by outcome; ``met`` has the whole text."""
    refusals: int = 0
    """Answers that sent a client to another orchestrator, or to come again."""
    longest_wait_s: float = 0.0
    """From a request's first try to the start of its answer, at most."""
    longest_silence_s: float = 0.0
    """Between two parts of a streamed text, at most."""
    faults: list[str] = field(default_factory=list)


class Clients:
    """``count`` clients, half of which stream. ``endpoints`` is looked at for each connection."""

    def __init__(self, endpoints: Sequence[str], count: int, seed: int) -> None:
        self.told = Told()
        self._endpoints = endpoints
        self._count = count
        self._seed = seed
        self._stopping = asyncio.Event()
        self._texts: dict[int, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Learn the expected texts, undisturbed; then start."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=_SILENT_S)
        # No connection is used twice, so that each goes where the endpoints say by then.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        for tokens in LENGTHS:
            outcome, text = await self._ask(tokens, False, random.Random(0))
            assert outcome == "met", outcome
            self._texts[tokens] = text
        self.told = Told()
        self._tasks = [asyncio.create_task(self._ask_on(n)) for n in range(self._count)]

    async def stop(self) -> None:
        """Let every client get its answer; nobody asks anew."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Break off what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while not self._stopping.is_set():
            tokens = rng.choice(LENGTHS)
            outcome, text = await self._ask(tokens, number % 2 == 0, rng)
            if outcome == "met" and text != self._texts[tokens]:
                outcome = "other text"
            self.told.outcomes[outcome] += 1
            if outcome != "met":
                self.told.faults.append(f"a request for {tokens} tokens came to {outcome}")
            await asyncio.sleep(rng.uniform(0.0, _PAUSE_S))

    async def _ask(self, tokens: int, streams: bool, rng: random.Random) -> tuple[str, str]:
        assert self._http is not None
        body = {
            "model": "demo",
            "prompt": "Once upon a time",
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": tokens,
            "stream": streams,
        }
        begun = time.monotonic()
        while True:
            url = f"http://{rng.choice(list(self._endpoints))}/v1/completions"
            try:
                async with self._http.post(url, json=body) as response:
                    if response.status in _REFUSED:
                        self.told.refusals += 1
                        await asyncio.sleep(_PAUSE_S)
                        continue
                    if response.status != 200:
                        return f"http_{response.status}", ""
                    if not streams:
                        return "met", (await response.json())["choices"][0]["text"]
                    return await self._read(response, begun)
            except _NEVER_THERE:
                self.told.refusals += 1
                await asyncio.sleep(_PAUSE_S)
            except (aiohttp.ClientError, TimeoutError) as error:
                return f"broken: {type(error).__name__}", ""

    async def _read(self, response: aiohttp.ClientResponse, begun: float) -> tuple[str, str]:
        texts: list[str] = []
        last: float | None = None
        async for raw in response.content:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            if last is None:
                self.told.longest_wait_s = max(self.told.longest_wait_s, now - begun)
            else:
                self.told.longest_silence_s = max(self.told.longest_silence_s, now - last)
            last = now
            if line == "data: [DONE]":
                return "met", "".join(texts)
            said: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in said:
                return str(said["error"].get("code")), ""
            texts += [choice["text"] for choice in said["choices"]]
        return "broken: no end", ""
