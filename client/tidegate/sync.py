"""The client for plain code: ``SyncClient`` has ``Client``'s methods, without ``await``.

An asynchronous client in a thread of its own does the work, under the deadline of the caller's
block.
"""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar, Unpack

from tidegate.chats import ChatAnswer, ChatDelta, ChatMessage, ChatOptions
from tidegate.client import DEFAULT_BASE_URL, Client
from tidegate.deadlines import Deadline
from tidegate.explanations import Explanation
from tidegate.listings import Instance, ModelInfo, TaskList
from tidegate.quotes import Quote
from tidegate.requests import Prompt, TaskOptions
from tidegate.results import Event, Generation, Submitted, TaskStatus
from tidegate.retries import Retries
from tidegate.streams import Stream
from tidegate.sync_operating import SyncOperating
from tidegate.sync_sessions import SyncSessions
from tidegate.sync_slots import SyncSlots

_INTERRUPTED_WAIT_S = 3.0
"""Seconds for which a call that Ctrl-C cut short may still tell the server."""

_T = TypeVar("_T")


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


class SyncClient:
    """``Client`` for plain code; close it, or use it as ``with``. Threads may share one."""

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        token: str | None = None,
        reconnect_for: timedelta | float = 30.0,
        retries: Retries | None = None,
    ) -> None:
        self._loop = LoopThread()
        make = _async(
            lambda: Client(base_url, token=token, reconnect_for=reconnect_for, retries=retries)
        )
        try:
            self._client = self._loop.run(make)
        except BaseException:
            self._loop.close()
            raise
        self._loop.on_close.append(self._client.close)
        self.sessions = SyncSessions(self, self._loop, self._client.sessions)
        """Conversations that the service keeps."""
        self.slots = SyncSlots(self._loop, self._client.slots, self._open)
        """Clips that the service renders."""
        self.operating = SyncOperating(self._loop, self._client.operating)
        """Calls to operate the service: drains, swaps and reloads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the streams that are still open, and close the connections. Idempotent."""
        self._loop.close()

    def _open(self, open_stream: Callable[[], Stream[_T]]) -> SyncStream[_T]:
        return SyncStream(self._loop, open_stream)

    def models(self) -> list[str]:
        """Names of the models that are served (``Client.models``)."""
        return self._loop.run(self._client.models)

    def model_infos(self) -> tuple[ModelInfo, ...]:
        """Models that are served, with what is known of them (``Client.model_infos``)."""
        return self._loop.run(self._client.model_infos)

    def instances(self) -> tuple[Instance, ...]:
        """Instances (Tritons) behind the service, as they stand (``Client.instances``)."""
        return self._loop.run(self._client.instances)

    def metrics(self) -> str:
        """Metrics of the service in Prometheus' text format (``Client.metrics``)."""
        return self._loop.run(self._client.metrics)

    def tasks(self, *, status: str | None = None, limit: int = 100) -> TaskList:
        """List tasks of this client's key: first those that run (``Client.tasks``)."""
        return self._loop.run(lambda: self._client.tasks(status=status, limit=limit))

    def submit(
        self,
        prompt: Prompt,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> Submitted:
        """Hand in a task and return at once. Raises ``ApiError`` if refused (``Client.submit``)."""
        return self._loop.run(
            lambda: self._client.submit(prompt, idempotency_key=idempotency_key, **options)
        )

    def quote(
        self,
        prompt: Prompt | None = None,
        *,
        prompt_tokens: int | None = None,
        accept: float | None = None,
        hold: Deadline = 5000.0,
        **options: Unpack[TaskOptions],
    ) -> Quote:
        """Ask for the chance that a task would be in time, by deadline (``Client.quote``)."""
        return self._loop.run(
            lambda: self._client.quote(
                prompt, prompt_tokens=prompt_tokens, accept=accept, hold=hold, **options
            )
        )

    def status(self, task_id: str) -> TaskStatus:
        """Get a task as it stands. Raises ``NotFound`` (``Client.status``)."""
        return self._loop.run(lambda: self._client.status(task_id))

    def explain(self, task_id: str) -> Explanation:
        """Ask why a task missed, and what alone would have met it (``Client.explain``)."""
        return self._loop.run(lambda: self._client.explain(task_id))

    def cancel(self, task_id: str) -> None:
        """Stop a task. Idempotent (``Client.cancel``)."""
        return self._loop.run(lambda: self._client.cancel(task_id))

    def events(
        self,
        task_id: str,
        *,
        last_event_id: str = "",
        deadline: Deadline | None = None,
    ) -> SyncStream[Event]:
        """Events of a task, from the beginning or after ``last_event_id`` (``Client.events``)."""
        return SyncStream(
            self._loop,
            lambda: self._client.events(task_id, last_event_id=last_event_id, deadline=deadline),
        )

    def stream(self, prompt: Prompt, **options: Unpack[TaskOptions]) -> SyncStream[Event]:
        """Submit a task and yield its events. Raises its ``ApiError`` (``Client.stream``)."""
        return SyncStream(self._loop, lambda: self._client.stream(prompt, **options))

    def generate(self, prompt: Prompt, **options: Unpack[TaskOptions]) -> Generation:
        """Submit a task and wait for its whole text (``Client.generate``)."""
        return self._loop.run(lambda: self._client.generate(prompt, **options))

    def chat(
        self, model: str, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
    ) -> ChatAnswer:
        """Send a chat in OpenAI's shape and wait for its whole answer (``Client.chat``)."""
        return self._loop.run(lambda: self._client.chat(model, messages, **options))

    def chat_stream(
        self, model: str, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
    ) -> SyncStream[ChatDelta]:
        """Send a chat and yield its answer as it grows (``Client.chat_stream``)."""
        return SyncStream(self._loop, lambda: self._client.chat_stream(model, messages, **options))
