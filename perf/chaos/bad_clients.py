"""Clients of the soak that send what is wrong or hang up; each knows which answers are right."""

import random
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from perf.chaos.clients import Ledger

TROUBLE: Final = ("cancelled", "dropped", "bad", "late")
_WORDS: Final = tuple(
    "the old sailor saw a small fox in garden under tree and told it many long tales".split()  # noqa: SIM905
)
_ENDS_AFTER_EVENTS: Final = 6


@dataclass(slots=True)
class BadClient:
    """Sends one request after the other; a wrong answer is a fault of the ledger."""

    http: aiohttp.ClientSession
    url: str
    ledger: Ledger
    rng: random.Random

    async def visit(self) -> None:
        """Send one request, of any kind."""
        kind = self.rng.choice(TROUBLE)
        try:
            outcome = await self._visit(kind)
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome = type(error).__name__
        if outcome != "right":
            self.ledger.fault(f"a {kind} request came to {outcome}")
        self.ledger.ended(kind, "met" if outcome == "right" else outcome)

    async def _visit(self, kind: str) -> str:
        match kind:
            case "cancelled":
                return await self._cancelled()
            case "dropped":
                return await self._dropped()
            case "bad":
                body = self._body() | self.rng.choice(
                    ({"max_tokens": -1}, {"prompt": 7}, {"temperature": "hot"}, {"top_p": 2})
                )
                return await self._status("/v1/completions", body, {400})
            case _:  # late: may be refused, cut, or just in time
                body = self._body() | {"max_tokens": 400}
                headers = {"X-Timeout-Ms": str(self.rng.randrange(15, 400))}
                return await self._status("/v1/completions", body, {200, 504}, headers)

    async def _status(
        self, path: str, body: dict[str, Any], right: set[int], headers: Any = None
    ) -> str:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            said = await response.text()
            return "right" if response.status in right else f"{response.status} {said[:200]}"

    async def _cancelled(self) -> str:
        """Cancel a task while it runs; the server must confirm it."""
        body = self._body() | {"max_tokens": 400, "durable": self.rng.random() < 0.5}
        async with self.http.post(f"{self.url}/v2/tasks", json=body) as response:
            if response.status != 202:
                return f"{response.status} {(await response.text())[:200]}"
            task = f"{self.url}/v2/tasks/{(await response.json())['task_id']}"
        await self._some_events(self.http.get(f"{task}/events"))
        async with self.http.delete(task) as response:
            return "right" if response.status < 300 else str(response.status)

    async def _dropped(self) -> str:
        """Leave a stream without a word."""
        body = self._body() | {"max_tokens": 400, "stream": True}
        await self._some_events(self.http.post(f"{self.url}/v1/completions", json=body))
        return "right"

    async def _some_events(self, asked: Any) -> None:
        async with asked as response:
            seen = 0
            async for line in response.content:
                seen += line.startswith(b"data:")
                if seen >= _ENDS_AFTER_EVENTS:
                    break
            response.close()

    def _body(self) -> dict[str, Any]:
        prompt = self._words(self.rng.randrange(3, 60))
        return {"model": "demo", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}

    def _words(self, count: int) -> str:
        return " ".join(self.rng.choice(_WORDS) for _ in range(count))
