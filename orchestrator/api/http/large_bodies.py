"""The thread on which large bodies become requests."""

import asyncio
import heapq
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar

from orchestrator.errors import DeadlineExceeded

T = TypeVar("T")

_BYTES_PER_S = 2**20
"""What a large body yields to smaller ones that come after it."""


class LargeBodies:
    """Turns large bodies into requests on a thread, one after the other.

    The decoder holds the interpreter lock throughout, for some 10 ms a megabyte, so the thread
    rests after each as long as it took: between two of them everybody else has a turn. A body goes
    before those that came up to a second earlier for each megabyte that they are larger.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidegate-bodies")
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = count()
        self._is_busy = False
        self._rests_until = 0.0

    async def work(self, call: Callable[[], T], size: int, due_at: float) -> T:
        """What ``call`` returns or raises. ``size`` is the body's, in bytes; ``due_at`` is on the
        loop's clock. Raises ``DeadlineExceeded`` when its turn has not come by then.
        """
        loop = asyncio.get_running_loop()
        if self._is_busy:
            turn = asyncio.Event()
            place = loop.time() + size / _BYTES_PER_S
            heapq.heappush(self._waiting, (place, next(self._numbers), turn))
            try:
                async with asyncio.timeout_at(due_at):
                    await turn.wait()
            except (asyncio.CancelledError, TimeoutError) as error:
                if turn.is_set():
                    self._next()
                else:
                    self._waiting = [entry for entry in self._waiting if entry[2] is not turn]
                    heapq.heapify(self._waiting)
                if isinstance(error, TimeoutError):
                    late_s = loop.time() - due_at
                    raise DeadlineExceeded.before("the body was read; send less", late_s) from None
                raise
        self._is_busy = True
        work = loop.run_in_executor(self._executor, self._work, call)
        work.add_done_callback(self._done)
        return await asyncio.shield(work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: "asyncio.Future[Any]") -> None:
        if not work.cancelled():
            work.exception()  # whoever asked may be gone, and it is no news then
        self._next()

    def _next(self) -> None:
        """Give the thread to the next one."""
        self._is_busy = bool(self._waiting)
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()

    def _work(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        if began < self._rests_until:
            time.sleep(self._rests_until - began)
            began = time.monotonic()
        try:
            return call()
        finally:
            ended = time.monotonic()
            self._rests_until = ended + (ended - began)
