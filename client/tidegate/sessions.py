"""Conversations that the service keeps, with their KV cache: a turn sends only its new text.

::

    async with client.sessions.open([{"role": "system", "content": "Answer briefly."}]) as session:
        print((await session.generate("What is a tide?")).text)
        print((await session.generate("And a gate?")).text)
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypedDict, Unpack
from urllib.parse import quote

import msgspec

from tidegate.deadlines import due
from tidegate.errors import TidegateError
from tidegate.following import Stream
from tidegate.requests import Kind, Message, Prompt, TaskOptions, kind_of, prompt_fields
from tidegate.results import Generation
from tidegate.transport import HttpCall, Transport

if TYPE_CHECKING:
    from tidegate.client import Client

_PATH = "/v2/sessions"
_DELETE_WAIT_S = 2.0


class SessionInfo(msgspec.Struct, frozen=True):
    """A session's state. Only ``get`` returns the conversation, in the field named by ``kind``."""

    session_id: str
    status: str
    task_id: str | None = None
    model: str | None = None
    kind: str | None = None
    turns: int = 0
    bytes: int = 0
    max_bytes: int | None = None
    idle_keep_s: float | None = None
    created_unix_ms: float | None = None
    expires_in_s: float | None = None
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    prompt_token_ids: tuple[int, ...] = ()


class SessionList(msgspec.Struct, frozen=True):
    """Sessions, oldest first; ``next_after`` starts the next page, None on the last page."""

    sessions: tuple[SessionInfo, ...]
    next_after: int | None = None


class SessionOptions(TypedDict, total=False):
    """Options of a session. ``idle_keep_s``: how long its KV is kept between two turns."""

    model: str | None
    idle_keep_s: float | None


class Session:
    """One conversation. It takes one turn at a time: the service refuses two at once."""

    def __init__(self, client: "Client", session_id: str, kind: Kind = "messages") -> None:
        self.id = session_id
        self.kind: Kind = kind
        self._client = client

    def stream(self, said: Prompt, **options: Unpack[TaskOptions]) -> Stream:
        """Send the next turn and yield its events, as ``Client.stream`` does."""
        options["session_id"] = self.id
        return self._client.stream(self._turn(said), **options)

    async def generate(self, said: Prompt, **options: Unpack[TaskOptions]) -> Generation:
        """Send the next turn and wait for its whole text, as ``Client.generate`` does."""
        options["session_id"] = self.id
        return await self._client.generate(self._turn(said), **options)

    async def info(self) -> SessionInfo:
        """Get the session with its whole conversation."""
        return await self._client.sessions.get(self.id)

    def _turn(self, said: Prompt) -> Prompt:
        """The prompt to send: in a session of messages, a text becomes a user message."""
        if self.kind == "messages" and isinstance(said, str):
            return [Message(role="user", content=said)]
        return said


class Sessions:
    """Calls for conversations that the service keeps, available as ``Client.sessions``."""

    def __init__(self, client: "Client", transport: Transport) -> None:
        self._client = client
        self._transport = transport

    @asynccontextmanager
    async def open(
        self, begin: Prompt | None = None, **options: Unpack[SessionOptions]
    ) -> AsyncIterator[Session]:
        """Open a session for an ``async with`` block. The end of the block deletes it."""
        session = await self.create(begin, **options)
        try:
            yield session
        finally:
            with suppress(TidegateError, TimeoutError):
                async with asyncio.timeout(_DELETE_WAIT_S):
                    await self.delete(session.id)

    async def create(
        self, begin: Prompt | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Begin a session with messages, a text, token ids or nothing."""
        body = {name: value for name, value in options.items() if value is not None}
        kind: Kind = "messages" if begin is None else kind_of(begin)
        if begin is not None:
            body |= prompt_fields(begin)
        call = HttpCall("POST", _PATH, body=body, is_idempotent=False, ends_at=due().at)
        made = await self._transport.call(call, SessionInfo)
        return Session(self._client, made.session_id, kind)

    async def get(self, session_id: str) -> SessionInfo:
        """Get one session with its whole conversation. Raises ``NotFound``."""
        return await self._transport.get(f"{_PATH}/{quote(session_id, safe='')}", SessionInfo)

    async def list(self, *, limit: int = 20, after: int = 0) -> SessionList:
        """List this key's sessions, oldest first; ``after``: the last page's ``next_after``."""
        return await self._transport.get(f"{_PATH}?limit={limit}&after={after}", SessionList)

    async def delete(self, session_id: str) -> None:
        """Delete a session and cancel a running turn. Sent even past a block's deadline."""
        await self._transport.send(HttpCall("DELETE", f"{_PATH}/{quote(session_id, safe='')}"))
