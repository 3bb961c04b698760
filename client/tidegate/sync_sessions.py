"""Sessions for plain code: what ``SyncClient.sessions`` offers."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from tidegate.errors import TidegateError
from tidegate.requests import Kind, Prompt, TaskOptions
from tidegate.results import Event, Generation
from tidegate.sessions import SessionInfo, SessionList, Sessions, turn

if TYPE_CHECKING:
    from tidegate.sync import SyncClient, SyncStream

_T = TypeVar("_T")


class Runs(Protocol):
    """Whatever can run a coroutine for plain code, and wait for its result."""

    def run(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T: ...


class SyncSession:
    """``Session`` for plain code: one conversation, its turns one after the other."""

    def __init__(self, client: "SyncClient", session_id: str, kind: Kind) -> None:
        self.id = session_id
        self.kind: Kind = kind
        self._client = client

    def stream(self, said: Prompt, **options: Unpack[TaskOptions]) -> "SyncStream[Event]":
        """Say the next turn and yield its events, as ``SyncClient.stream`` does."""
        options["session_id"] = self.id
        return self._client.stream(turn(self.kind, said), **options)

    def generate(self, said: Prompt, **options: Unpack[TaskOptions]) -> Generation:
        """Say the next turn and wait for its whole text, as ``SyncClient.generate`` does."""
        options["session_id"] = self.id
        return self._client.generate(turn(self.kind, said), **options)

    def info(self) -> SessionInfo:
        """Get the session as it stands, with all that was said."""
        return self._client.sessions.get(self.id)


class SyncSessions:
    """``Sessions`` for plain code."""

    def __init__(self, client: "SyncClient", loop: Runs, sessions: Sessions) -> None:
        self._client = client
        self._loop = loop
        self._sessions = sessions

    @contextmanager
    def open(
        self,
        begin: Prompt | None = None,
        *,
        model: str | None = None,
        idle_keep_s: float | None = None,
    ) -> Iterator[SyncSession]:
        """Open a session for a ``with`` block, which deletes it at the end (``Sessions.open``)."""
        session = self.create(begin, model=model, idle_keep_s=idle_keep_s)
        try:
            yield session
        finally:
            with suppress(TidegateError):
                self.delete(session.id)

    def create(
        self,
        begin: Prompt | None = None,
        *,
        model: str | None = None,
        idle_keep_s: float | None = None,
    ) -> SyncSession:
        """Begin a session with messages, a text, token ids or nothing (``Sessions.create``)."""
        made = self._loop.run(
            lambda: self._sessions.create(begin, model=model, idle_keep_s=idle_keep_s)
        )
        return SyncSession(self._client, made.id, made.kind)

    def get(self, session_id: str) -> SessionInfo:
        """Get one session, with all that was said. Raises ``NotFound`` (``Sessions.get``)."""
        return self._loop.run(lambda: self._sessions.get(session_id))

    def list(self, *, limit: int = 20, after: int = 0) -> SessionList:
        """List the sessions of this client's key, oldest first (``Sessions.list``)."""
        return self._loop.run(lambda: self._sessions.list(limit=limit, after=after))

    def delete(self, session_id: str) -> None:
        """Delete a session; a turn that runs is cancelled (``Sessions.delete``)."""
        return self._loop.run(lambda: self._sessions.delete(session_id))
