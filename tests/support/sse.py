"""Server-sent events as a test wants to see them."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass
class Event:
    """One server-sent event."""

    id: str = ""
    event: str = "message"
    data: str = ""

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.data)
        return value


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """Events as they come; the stream's comments are skipped."""
    event = Event()
    async for line in response.content:
        text = line.decode().rstrip("\r\n")
        if text.startswith(":"):
            continue
        if text:
            name, _, value = text.partition(": ")
            setattr(event, name, value)
        elif event != Event():
            yield event
            event = Event()


async def events_of(http: aiohttp.ClientSession, url: str, after: str = "") -> list[Event]:
    """All events of a task that come after one, to the end of the stream."""
    headers = {"Last-Event-ID": after} if after else {}
    async with http.get(url, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return [event async for event in read_events(response)]
