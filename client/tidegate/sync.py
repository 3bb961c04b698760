"""The client for plain code: ``SyncClient`` has ``Client``'s methods, without ``await``."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Self

from tidegate.client import DEFAULT_BASE_URL, Client
from tidegate.errors import TidegateError
from tidegate.operating import Operating
from tidegate.requests import Kind, Prompt
from tidegate.retries import Retries
from tidegate.sessions import Session, Sessions
from tidegate.slots import Slots
from tidegate.sync_calls import LoopThread, SyncPart, plain, plain_stream


class SyncClient(SyncPart[Client]):
    """``Client`` for plain code; close it, or use it as ``with``. Threads may share one."""

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        token: str | None = None,
        reconnect_for: timedelta | float = 30.0,
        retries: Retries | None = None,
    ) -> None:
        async def make() -> Client:
            return Client(base_url, token=token, reconnect_for=reconnect_for, retries=retries)

        loop = LoopThread()
        try:
            client = loop.run(make)
        except BaseException:
            loop.close()
            raise
        loop.on_close.append(client.close)
        super().__init__(loop, client)
        self.sessions = SyncSessions(loop, client.sessions)
        """Conversations that the service keeps."""
        self.slots = SyncSlots(loop, client.slots)
        """Clips that the service renders."""
        self.operating = SyncOperating(loop, client.operating)
        """Calls to operate the service: drains, swaps and reloads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the streams that are still open, and close the connections. Idempotent."""
        self._loop.close()

    models = plain(Client.models)
    model_infos = plain(Client.model_infos)
    instances = plain(Client.instances)
    metrics = plain(Client.metrics)
    tasks = plain(Client.tasks)
    submit = plain(Client.submit)
    quote = plain(Client.quote)
    status = plain(Client.status)
    cancel = plain(Client.cancel)
    events = plain_stream(Client.events)
    stream = plain_stream(Client.stream)
    generate = plain(Client.generate)
    chat = plain(Client.chat)
    chat_stream = plain_stream(Client.chat_stream)


class SyncSession(SyncPart[Session]):
    """``Session`` for plain code: one conversation, its turns one after the other."""

    @property
    def id(self) -> str:
        return self._part.id

    @property
    def kind(self) -> Kind:
        return self._part.kind

    stream = plain_stream(Session.stream)
    generate = plain(Session.generate)
    info = plain(Session.info)


class SyncSessions(SyncPart[Sessions]):
    """``Sessions`` for plain code."""

    _create = plain(Sessions.create)

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
        made = self._create(begin, model=model, idle_keep_s=idle_keep_s)
        return SyncSession(self._loop, made)

    get = plain(Sessions.get)
    list = plain(Sessions.list)
    delete = plain(Sessions.delete)


class SyncSlots(SyncPart[Slots]):
    """``Slots`` for plain code."""

    create = plain(Slots.create)
    get = plain(Slots.get)
    list = plain(Slots.list)
    cancel = plain(Slots.cancel)
    download = plain(Slots.download)
    events = plain_stream(Slots.events)
    stream = plain_stream(Slots.stream)
    render = plain(Slots.render)


class SyncOperating(SyncPart[Operating]):
    """``Operating`` for plain code; what is called back is called on the client's own thread."""

    drain = plain(Operating.drain)
    drain_state = plain(Operating.drain_state)
    undrain = plain(Operating.undrain)
    drain_instance = plain(Operating.drain_instance)
    undrain_instance = plain(Operating.undrain_instance)
    swap = plain(Operating.swap)
    reload_instance = plain(Operating.reload_instance)
    swap_all = plain(Operating.swap_all)
    reload = plain(Operating.reload)
