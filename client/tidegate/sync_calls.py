"""Calls and streams for plain code, made of the asynchronous ones.

An asynchronous client in a thread of its own does the work, under the deadline of the caller's
block.
"""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from tidegate.streams import Stream

_INTERRUPTED_WAIT_S = 3.0
"""Seconds for which a call that Ctrl-C cut short may still tell the server."""

_T = TypeVar("_T")
_P = ParamSpec("_P")
_S = TypeVar("_S")


class LoopThread:
    """An event loop in a thread of its own; other threads have it run coroutines, and wait for
    them.

    Ends at ``close``, or with the process: streams that are still open then are closed properly.
    """

    def __init__(self) -> None:
        self.on_close: list[Callable[[], Coroutine[Any, Any, object]]] = []
        """Actions run at the close, once no stream is open any more."""
        self.open_streams: set[Stream[Any]] = set()
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tidegate-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run the coroutine; returns or raises as it does. Ctrl-C cancels it and waits for its
        end."""
        if self.is_closed:
            raise RuntimeError("this client is closed")
        done: Future[_T] = Future()
        tasks: list[asyncio.Task[_T]] = []

        def start() -> None:
            # Runs in a copy of the calling thread's context, and so the task has its deadline.
            task = self._loop.create_task(make())
            tasks.append(task)
            task.add_done_callback(lambda ended: _hand_over(ended, done))

        self._loop.call_soon_threadsafe(start)
        try:
            return done.result()
        except BaseException:
            if not done.done():
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                with suppress(CancelledError, Exception):
                    done.result(_INTERRUPTED_WAIT_S)
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
        for action in self.on_close:
            await action()

    @property
    def is_current(self) -> bool:
        """Whether the caller is in the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Start ``coroutine`` without waiting for it; only for the loop's own thread."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


def _hand_over(ended: asyncio.Task[_T], done: Future[_T]) -> None:
    if ended.cancelled():
        done.cancel()
    elif (error := ended.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())


class SyncStream(Generic[_T]):
    """A stream to iterate over. Leaving the loop, ``with`` or ``close()`` cancels the work."""

    def __init__(self, loop: LoopThread, open_stream: Callable[[], Stream[_T]]) -> None:
        self._stream = loop.run(_async(open_stream))
        self._items = _items(loop, self._stream)

    @property
    def last_event_id(self) -> str:
        """Id of the last event read; ``events`` goes on after it (``Stream.last_event_id``)."""
        return self._stream.last_event_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        return next(self._items)

    def close(self) -> None:
        """Stop reading; work that nobody reads is cancelled."""
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _async(call: Callable[[], _T]) -> Callable[[], Coroutine[Any, Any, _T]]:
    async def run() -> _T:
        return call()

    return run


def _items(loop: LoopThread, stream: Stream[_T]) -> Generator[_T, None, None]:
    async def following() -> tuple[_T] | None:
        try:
            return (await anext(stream),)
        except StopAsyncIteration:  # no task may end with it
            return None

    loop.open_streams.add(stream)
    try:
        while (item := loop.run(following)) is not None:
            yield item[0]
    finally:
        loop.open_streams.discard(stream)
        if loop.is_current:  # the collector may come by in any thread
            loop.spawn(stream.aclose())
        elif not loop.is_closed:
            loop.run(stream.aclose)


class SyncPart(Generic[_S]):
    """What ``part`` of an asynchronous client offers, for plain code."""

    def __init__(self, loop: LoopThread, part: _S) -> None:
        self._loop = loop
        self._part = part


def plain(
    call: Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[SyncPart[_S], _P], _T]:
    """``call`` for plain code: runs it on the client's thread and waits for its result."""

    @wraps(call)
    def run(self: SyncPart[_S], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._loop.run(lambda: call(self._part, *args, **kwargs))

    return run


def plain_stream(
    call: Callable[Concatenate[_S, _P], Stream[_T]],
) -> Callable[Concatenate[SyncPart[_S], _P], SyncStream[_T]]:
    """``call`` for plain code: opens a stream to iterate over."""

    @wraps(call)
    def run(self: SyncPart[_S], /, *args: _P.args, **kwargs: _P.kwargs) -> SyncStream[_T]:
        return SyncStream(self._loop, lambda: call(self._part, *args, **kwargs))

    return run
