"""The client for synchronous code: ``SyncClient`` has ``Client``'s methods, without ``await``.

An asynchronous client does the work in its own thread, under the deadline of the caller's block.
"""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from tidegate.client import DEFAULT_BASE_URL, Client
from tidegate.errors import TidegateError
from tidegate.following import Stream
from tidegate.operating import Operating
from tidegate.requests import Prompt
from tidegate.results import Event
from tidegate.sessions import Session, SessionOptions, Sessions
from tidegate.transport import Retries

_INTERRUPTED_WAIT_S = 3.0
"""Seconds in which a call that Ctrl-C interrupts may still cancel on the server."""

_T = TypeVar("_T")
_P = ParamSpec("_P")
_S = TypeVar("_S")


class LoopThread:
    """An event loop in its own thread; other threads run coroutines on it and wait for them.

    It ends at ``close`` or with the process, and closes its streams and its client.
    """

    def __init__(self) -> None:
        self.open_streams: set[Stream] = set()
        self.client: Client | None = None
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tidegate-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run the coroutine; return its result or raise its error. Ctrl-C cancels and awaits it."""
        if self.is_closed:
            raise RuntimeError("this client is closed")
        ended, is_cut = threading.Event(), threading.Event()
        tasks: list[asyncio.Task[Any] | None] = []

        async def work() -> _T:
            tasks.append(asyncio.current_task())
            try:
                if is_cut.is_set():
                    raise asyncio.CancelledError
                return await make()
            finally:
                ended.set()

        def cancel() -> None:
            for task in tasks:
                assert task is not None
                task.cancel()

        try:
            # The task gets a copy of this thread's context, which holds its deadline.
            return asyncio.run_coroutine_threadsafe(work(), self._loop).result()
        except BaseException:
            # Ctrl-C may come just after the work is handed over, before the future is assigned.
            if not ended.is_set():
                is_cut.set()
                self._loop.call_soon_threadsafe(cancel)
                ended.wait(_INTERRUPTED_WAIT_S)
            raise

    def close(self) -> None:
        """Close open streams and end the thread. Idempotent."""
        if self.is_closed:
            return
        atexit.unregister(self.close)
        self.run(self._end)
        self.is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        for stream in tuple(self.open_streams):
            await stream.aclose()
        if self.client is not None:
            await self.client.close()

    def leave(self, stream: Stream) -> None:
        """Close ``stream``. Waits for it, except on the loop's own thread, which must not wait for
        itself: the garbage collector runs in any thread."""
        self.open_streams.discard(stream)
        if threading.current_thread() is self._thread:
            task = self._loop.create_task(stream.aclose())
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        elif not self.is_closed:
            self.run(stream.aclose)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


class SyncStream:
    """A stream to iterate over. Leaving the loop, ``with`` or ``close()`` cancels the work."""

    def __init__(self, loop: LoopThread, stream: Stream) -> None:
        self._stream = stream
        self._items = _items(loop, stream)

    @property
    def last_event_id(self) -> str:
        """Id of the last event read; ``events`` continues after it (``Stream.last_event_id``)."""
        return self._stream.last_event_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return next(self._items)

    def close(self) -> None:
        """Stop reading, and cancel the work."""
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _items(loop: LoopThread, stream: Stream) -> Generator[Event, None, None]:
    async def following() -> Event | None:
        return await anext(stream, None)  # a task must not raise StopAsyncIteration

    loop.open_streams.add(stream)
    try:
        while (item := loop.run(following)) is not None:
            yield item
    finally:
        loop.leave(stream)


class SyncPart(Generic[_S]):
    """Synchronous wrapper of one ``part`` of an asynchronous client."""

    def __init__(self, loop: LoopThread, part: _S) -> None:
        self._loop = loop
        self._part = part


def plain(
    call: Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[SyncPart[_S], _P], _T]:
    """Synchronous version of ``call``: runs it on the client's thread and waits for its result."""

    @wraps(call)
    def run(self: SyncPart[_S], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._loop.run(lambda: call(self._part, *args, **kwargs))

    return run


def plain_stream(
    call: Callable[Concatenate[_S, _P], Stream],
) -> Callable[Concatenate[SyncPart[_S], _P], SyncStream]:
    """Synchronous version of ``call``: opens a stream to iterate over."""

    @wraps(call)
    def run(self: SyncPart[_S], /, *args: _P.args, **kwargs: _P.kwargs) -> SyncStream:
        return SyncStream(self._loop, call(self._part, *args, **kwargs))

    return run


class SyncClient(SyncPart[Client]):
    """Synchronous ``Client``; close it, or use it in ``with``. Threads may share one."""

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
            client = loop.client = loop.run(make)
        except BaseException:
            loop.close()
            raise
        super().__init__(loop, client)
        self.sessions = SyncSessions(loop, client.sessions)
        self.operating = SyncOperating(loop, client.operating)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open streams and the connections. Idempotent."""
        self._loop.close()

    run = staticmethod(Client.run)
    models = plain(Client.models)
    model_infos = plain(Client.model_infos)
    instances = plain(Client.instances)
    tasks = plain(Client.tasks)
    submit = plain(Client.submit)
    quote = plain(Client.quote)
    status = plain(Client.status)
    cancel = plain(Client.cancel)
    events = plain_stream(Client.events)
    stream = plain_stream(Client.stream)
    generate = plain(Client.generate)


class SyncSession(SyncPart[Session]):
    """Synchronous ``Session``: one conversation, one turn at a time."""

    def __init__(self, loop: LoopThread, part: Session) -> None:
        super().__init__(loop, part)
        self.id, self.kind = part.id, part.kind

    stream = plain_stream(Session.stream)
    generate = plain(Session.generate)
    info = plain(Session.info)


class SyncSessions(SyncPart[Sessions]):
    """Synchronous ``Sessions``."""

    _create = plain(Sessions.create)

    @contextmanager
    def open(
        self, begin: Prompt | None = None, **options: Unpack[SessionOptions]
    ) -> Iterator[SyncSession]:
        """Open a session for a ``with`` block, which deletes it at the end (``Sessions.open``)."""
        session = self.create(begin, **options)
        try:
            yield session
        finally:
            with suppress(TidegateError):
                self.delete(session.id)

    def create(self, begin: Prompt | None = None, **options: Unpack[SessionOptions]) -> SyncSession:
        """Begin a session with messages, a text, token ids or nothing (``Sessions.create``)."""
        return SyncSession(self._loop, self._create(begin, **options))

    get = plain(Sessions.get)
    list = plain(Sessions.list)
    delete = plain(Sessions.delete)


class SyncOperating(SyncPart[Operating]):
    """Synchronous ``Operating``; callbacks run on the client's own thread."""

    drain = plain(Operating.drain)
    drain_state = plain(Operating.drain_state)
    undrain = plain(Operating.undrain)
    drain_instance = plain(Operating.drain_instance)
    undrain_instance = plain(Operating.undrain_instance)
    swap = plain(Operating.swap)
    reload_instance = plain(Operating.reload_instance)
    reload = plain(Operating.reload)
