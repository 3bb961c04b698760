"""Native SSE events as a test wants to see them."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Event:
    id: str
    kind: str
    data: dict[str, Any]


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """Events as they come; the stream's comments are skipped."""
    fields: dict[str, str] = {}
    async for line in response.content:
        text = line.decode().rstrip("\r\n")
        if text.startswith(":"):
            continue
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif fields:
            yield Event(fields.get("id", ""), fields["event"], json.loads(fields["data"]))
            fields = {}


async def events_of(
    http: aiohttp.ClientSession, url: str, last_event_id: str | None = None
) -> list[Event]:
    """All events of a task, to the end of the stream."""
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    async with http.get(url, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return [event async for event in read_events(response)]
