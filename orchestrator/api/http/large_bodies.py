"""The thread on which large bodies become requests."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from orchestrator.errors import DeadlineExceeded
from orchestrator.fair_gate import FairGate

T = TypeVar("T")

_BYTES_PER_S = 2**20
"""Size in bytes that sets a body back by one second in its tenant's order of work."""


class LargeBodies:
    """Turns large bodies into requests on a thread, one after the other, tenants in turn.

    The decoder holds the interpreter lock throughout, for some 10 ms per megabyte, so the thread
    rests after each body for as long as it took, and gives everybody else a turn. A tenant's body
    goes before those of its own that came up to a second earlier for each megabyte that they are
    larger.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tidegate-bodies")
        self._gate = FairGate()
        self._rests_until = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a body is being worked on."""
        return self._gate.is_busy

    async def work(self, call: Callable[[], T], size: int, due_at: float, tenant: str = "") -> T:
        """Run ``call`` on the thread; returns or raises what it does. ``size`` is the body's, in
        bytes; ``due_at`` is on the loop's clock. Raises ``DeadlineExceeded`` if its turn has not
        come by then."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(due_at):
                await self._gate.enter(tenant, loop.time() + size / _BYTES_PER_S)
        except TimeoutError:
            late_s = loop.time() - due_at
            raise DeadlineExceeded.before("the body was read; send less", late_s) from None
        began = loop.time()

        def done(work: "asyncio.Future[Any]") -> None:
            if not work.cancelled():
                work.exception()  # whoever asked may be gone, and then nobody needs to know
            self._gate.leave(tenant, loop.time() - began)

        work = loop.run_in_executor(self._executor, self._work, call)
        work.add_done_callback(done)
        return await asyncio.shield(work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

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
