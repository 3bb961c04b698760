"""Completions asked for as a sensible client does behind a load balancer.

What is refused, or never got through, is sent to another server. Outcomes are words: ``met``,
``broken``, or an error's code.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

PAUSE_S: Final = 0.1
"""Seconds between two rounds of tries."""
NEVER_THERE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors after which a request got to nobody, and may be sent to another."""
_REFUSED: Final = (429, 503)


@dataclass(slots=True)
class Asker:
    """A client whose every request has ``headers``. ``refused`` is called for each answer that
    sends it elsewhere, or to come again, ``heard`` for each part of a streamed text."""

    http: aiohttp.ClientSession
    headers: Mapping[str, str]
    refused: Callable[[], None]
    heard: Callable[[], None] = lambda: None

    def is_refused(self, response: aiohttp.ClientResponse) -> bool:
        """Whether an answer sends its client elsewhere; calls ``refused`` then."""
        if response.status not in _REFUSED:
            return False
        self.refused()
        return True

    async def complete(self, urls: AsyncIterator[str], body: Mapping[str, Any]) -> tuple[str, str]:
        """Outcome and text of a completion, streamed where ``body`` says so; the next of ``urls``
        is asked where one refuses, or is not there."""
        async for url in urls:
            try:
                async with self.http.post(
                    f"{url}/v1/completions", json=body, headers=self.headers
                ) as response:
                    if self.is_refused(response):
                        continue
                    if response.status != 200:
                        return await _code_of(response), ""
                    if body.get("stream"):
                        return await self._read(response)
                    return "met", (await response.json())["choices"][0]["text"]
            except NEVER_THERE:
                continue
            except (aiohttp.ClientError, TimeoutError):
                return "broken", ""
        raise AssertionError("no server is left to ask")

    async def _read(self, response: aiohttp.ClientResponse) -> tuple[str, str]:
        texts: list[str] = []
        async with aclosing(events_of(response)) as events:
            async for event in events:
                self.heard()
                if event.data == "[DONE]":
                    return "met", "".join(texts)
                said = json.loads(event.data)
                if "error" in said:
                    return str(said["error"].get("code")), ""
                texts += [choice["text"] for choice in said["choices"]]
        return "broken", ""


@dataclass(frozen=True, slots=True)
class SentEvent:
    """A server-sent event; ``id`` is None where it has none."""

    name: str
    id: int | None
    data: str


async def events_of(response: aiohttp.ClientResponse) -> AsyncGenerator[SentEvent, None]:
    """Events of a response as they come."""
    name, number, data = "message", None, ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        key, _, value = line.partition(": ")
        if not line:
            if data:
                yield SentEvent(name, number, data)
            name, number, data = "message", None, ""
        elif key == "event":
            name = value
        elif key == "id":
            number = int(value)
        elif key == "data":
            data = value


async def _code_of(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"]["code"])
    except (ValueError, KeyError, aiohttp.ClientError):
        return f"http_{response.status}"
