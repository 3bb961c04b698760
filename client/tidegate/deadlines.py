"""A deadline for everything within a block, and time limits for an agent's tools::

    @tool_deadline(5, share=0.5)                 # at most 5 s, and at most half of the time left
    async def search(query: str) -> str: ...

    with tidegate.deadline(10):                  # seconds
        plan = await client.generate(question)   # has 10 s
        with tidegate.deadline(3):               # the earlier one counts
            hint = await client.generate(plan.text)
        try:
            found = await search("tides")
        except tidegate.ToolTimeout:
            found = ""                           # the run continues without it

A block applies to ``async`` and synchronous code, and to tasks and threads that inherit the context
(``asyncio.create_task``, ``asyncio.to_thread``). Every call sends the remaining time to the server;
if no time is left, it raises ``DeadlineExceeded`` and sends nothing. Your own code is not
interrupted. ``timeout_headers`` passes the remaining time to other services over HTTP.

``deadline(10, tell_time=True)`` makes the block's conversations one run. The model is told how much
time is left, and at the share ``wind_down`` it is told to give its final answer. From the share
``tools_until`` on, it gets no tools.

A tool runs within its own deadline block, so its own calls (a sub-agent's, for example) send the
time that the tool has left. Time that it does not use stays with the run.
"""

import asyncio
import inspect
import math
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar, Token, copy_context
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, cast

from tidegate import _clock
from tidegate.errors import DeadlineExceeded, ToolTimeout

Deadline = timedelta | float
"""Deadline of one call from now: a ``timedelta``, or milliseconds as in ``deadline_ms``."""

_current: ContextVar[float] = ContextVar("tidegate_deadline", default=math.inf)
"""When the innermost block ends, in seconds of ``_clock.now``."""
told: ContextVar[Mapping[str, Any]] = ContextVar("tidegate_told", default={})  # noqa: B039
"""Fields that the innermost block that tells the model the time adds to conversations."""


class DeadlineScope:
    """A ``with`` block whose calls share ``seconds``, counted from its entry. The other arguments
    set whether, and at which shares left, its conversations tell the model the time. Raises
    ``ValueError`` unless finite."""

    def __init__(
        self,
        seconds: float | timedelta,
        *,
        tell_time: bool = False,
        wind_down: float | None = None,
        tools_until: float | None = None,
    ) -> None:
        shares = {"wind_down": wind_down, "tools_until": tools_until}
        self._seconds = block_seconds(seconds, "a deadline")
        self._tells: dict[str, Any] = {"tell_time": True} if tell_time else {}
        self._tells |= {name: share for name, share in shares.items() if share is not None}
        self._entered: list[tuple[float, Token[float], Token[Mapping[str, Any]]]] = []

    def __enter__(self) -> Self:
        ends_at = min(_clock.now() + self._seconds, _current.get())
        fields = told.get()
        if self._tells:
            fields = {"session_id": f"run-{uuid.uuid4().hex}", **self._tells}
        self._entered.append((ends_at, _current.set(ends_at), told.set(fields)))
        return self

    def __exit__(self, *_: object) -> None:
        entered = self._entered.pop()
        _current.reset(entered[1])
        told.reset(entered[2])

    def remaining(self) -> float:
        """Seconds left, including any outer block's deadline; negative once it has passed."""
        return self._entered[-1][0] - _clock.now() if self._entered else self._seconds


deadline = DeadlineScope


def block_seconds(given: float | timedelta, name: str, per_s: int = 1) -> float:
    """``given`` in seconds. Raises ``ValueError``, with ``name`` in it, unless it is finite."""
    try:
        seconds = given.total_seconds() if isinstance(given, timedelta) else float(given) / per_s
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{name} must be a timedelta or a finite number, got {given!r}")
    return seconds


def remaining() -> float | None:
    """Seconds left of the caller's block, negative once it is over; None outside any block."""
    ends_at = _current.get()
    return None if ends_at == math.inf else ends_at - _clock.now()


def to_seconds(deadline: Deadline) -> float:
    """A relative time (a ``timedelta`` or milliseconds) in seconds, as ``block_seconds``."""
    return block_seconds(deadline, "a deadline", 1000)


class CallDeadline(NamedTuple):
    """Deadline of a call, in seconds and on our clock; None without one."""

    in_s: float | None
    at: float | None


def due(stated: Deadline | None = None) -> CallDeadline:
    """Deadline of a call that begins now: the stated one or its block's, if earlier.

    Raises ``DeadlineExceeded`` if the block's deadline has passed. The server refuses, and counts,
    a call whose own deadline has passed.
    """
    block_s = remaining()
    if block_s is not None and block_s <= 0:
        raise DeadlineExceeded(
            f"the deadline of this block passed {-block_s * 1000:.0f} ms ago; nothing was sent",
            code="deadline_exceeded",
        )
    stated_s = None if stated is None else to_seconds(stated)
    in_s = min((s for s in (block_s, stated_s) if s is not None), default=None)
    return CallDeadline(in_s, None if in_s is None else _clock.now() + in_s)


_P = ParamSpec("_P")
_R = TypeVar("_R")


class ToolDeadline:
    """Limits a tool to ``seconds``, or to ``share`` (0 to 1) of the time left in the enclosing
    block, whichever is less.

    Use it as a decorator of a function, ``async`` or not, or in ``async with``. A late tool raises
    ``ToolTimeout``. Asynchronous code is cancelled. A synchronous function runs in its own thread,
    so it keeps running; there, ``remaining()`` is below zero. Raises ``ValueError`` for a time or
    a share that limits nothing.
    """

    def __init__(self, seconds: float | timedelta | None = None, *, share: float = 1.0) -> None:
        self._seconds = None if seconds is None else block_seconds(seconds, "a tool's time")
        if self._seconds is not None and self._seconds <= 0:
            raise ValueError(f"a tool's time must be more than 0 seconds, got {seconds!r}")
        if not 0 < share <= 1:
            raise ValueError(
                f"a share of the time left must be above 0 and at most 1, got {share!r}"
            )
        self._share = share
        self._block: AbstractAsyncContextManager[None] | None = None

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Limit each call of ``function``. Raises ``TypeError`` for a generator function."""
        name = getattr(function, "__name__", repr(function))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{name} yields its results one by one, but tool_deadline limits functions that "
                "return: put `async with tool_deadline(...)` around the loop that reads it"
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def limited(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                async with _limited(name, self._limit_s(name)):
                    return await function(*args, **kwargs)

            return cast("Callable[_P, _R]", limited)

        @wraps(function)
        def waited_for(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return _in_thread(name, self._limit_s(name), lambda: function(*args, **kwargs))

        return waited_for

    async def __aenter__(self) -> None:
        self._block = _limited("the block", self._limit_s("the block"))
        await self._block.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        assert self._block is not None
        return await self._block.__aexit__(*raised)

    def _limit_s(self, name: str) -> float | None:
        """Seconds that a call that begins now may take; None for no limit. Raises
        ``ToolTimeout`` if no time is left."""
        left_s = remaining()
        if left_s is None:
            return self._seconds
        if left_s <= 0:
            raise ToolTimeout(
                f"{name} was not started: the deadline of this block passed "
                f"{-left_s * 1000:.0f} ms ago"
            )
        limit_s = left_s * self._share
        return limit_s if self._seconds is None else min(limit_s, self._seconds)


tool_deadline = ToolDeadline


@asynccontextmanager
async def _limited(name: str, limit_s: float | None) -> AsyncIterator[None]:
    if limit_s is None:
        yield
        return
    timer = asyncio.timeout(limit_s)
    try:
        with DeadlineScope(limit_s):
            async with timer:
                yield
    except TimeoutError as error:
        # A TimeoutError of the tool's own passes through.
        if timer.expired() or isinstance(error, DeadlineExceeded):
            raise _too_late(name, limit_s) from error
        raise


def _in_thread(name: str, limit_s: float | None, call: Callable[[], _R]) -> _R:
    if limit_s is None:
        return call()
    done: Future[_R] = Future()

    def work() -> None:
        try:
            with DeadlineScope(limit_s):
                done.set_result(call())
        except BaseException as error:  # includes SystemExit: the caller raises it
            done.set_exception(error)

    # A daemon thread, so that a tool that never ends does not block the program's exit.
    threading.Thread(target=copy_context().run, args=(work,), name=name, daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError as error:
        is_the_tools_own = done.done() and done.exception() is error
        if is_the_tools_own and not isinstance(error, DeadlineExceeded):
            raise
        raise _too_late(name, limit_s) from error


def _too_late(name: str, limit_s: float) -> ToolTimeout:
    return ToolTimeout(f"{name} did not finish within its {limit_s:.3g} s")


def timeout_headers() -> dict[str, str]:
    """Headers that pass on the time left in the caller's block: ``X-Timeout-Ms``, which Tidegate
    reads on every route. Empty outside any block."""
    left_s = remaining()
    return {} if left_s is None else {"X-Timeout-Ms": str(max(0, round(left_s * 1000)))}
