"""Clients that ask again and again, and know the text that they must get."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from perf.load.askers import PAUSE_S, Asker
from perf.rollout.pods import TOKEN

LENGTHS: Final = (16, 96, 240)
"""Tokens of answers: at 20 ms each the longest take 5 s, less than a drain."""
_SILENT_S: Final = 30.0


@dataclass(slots=True)
class ClientRecord:
    """What came of clients' requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by outcome; ``met`` has the whole text."""
    refusals: int = 0
    """Answers that sent a client to another orchestrator, or to come again."""
    longest_wait_s: float = 0.0
    """Longest time from a request's first try to the start of its answer, in seconds."""
    longest_silence_s: float = 0.0
    """Longest time between two parts of a streamed text, in seconds."""
    faults: list[str] = field(default_factory=list)


class Clients:
    """``count`` clients, half of which stream. ``endpoints`` is looked at for each connection."""

    def __init__(self, endpoints: Sequence[str], count: int, seed: int) -> None:
        self.record = ClientRecord()
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
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        for tokens in LENGTHS:
            outcome, text = await self._ask(tokens, False, random.Random(0))
            assert outcome == "met", outcome
            self._texts[tokens] = text
        self.record = ClientRecord()
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
            self.record.outcomes[outcome] += 1
            if outcome != "met":
                self.record.faults.append(f"a request for {tokens} tokens came to {outcome}")
            await asyncio.sleep(rng.uniform(0.0, PAUSE_S))

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
        last: float | None = None

        def heard() -> None:
            nonlocal last
            now = time.monotonic()
            if last is None:
                self.record.longest_wait_s = max(self.record.longest_wait_s, now - begun)
            else:
                self.record.longest_silence_s = max(self.record.longest_silence_s, now - last)
            last = now

        asker = Asker(self._http, {"Authorization": f"Bearer {TOKEN}"}, lambda: None, heard)
        return await asker.complete(self._urls(rng), body)

    async def _urls(self, rng: random.Random) -> AsyncIterator[str]:
        """Any of the endpoints, as they are by then, again and again."""
        while True:
            yield f"http://{rng.choice(list(self._endpoints))}"
            self.record.refusals += 1  # refused, or not there
            await asyncio.sleep(PAUSE_S)
