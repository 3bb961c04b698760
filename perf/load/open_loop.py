"""An open-loop load generator: it sends requests when they are due, independent of the others.

    python -m perf.load.open_loop PLAN.json        prints the results as JSON

It runs in its own process with one event loop. Each request has its own connection (connections are
reused). Streams are counted as bytes. All times count from when the request was *due*, so that a
slow service cannot look fast (coordinated omission). Waiting clients hang up at the end, or each at
its deadline. Deadlines for parts of an answer are judged as its events arrive, one token each:
token n is due n - 1 gaps after the first token's deadline.
"""

import asyncio
import gc
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from perf.load.connection import CONTENT_LENGTH, EVENT, LAST_BYTES, TAIL, USAGE, request_bytes

HUNG_UP = "hung_up"
"""Code of a request whose client waited until its deadline."""
FIRST_TOKEN, TOKEN_GAP = "first_token", "token_gap"
"""Names of the parts of an answer that can be missed."""
_CODE = re.compile(rb'"code": ?"([a-z_]+)"')
_FINISH = re.compile(rb'"finish_reason": ?"([a-z_]+)"')
_EVENT = EVENT[1:]
_ROLE = b'"role"'
"""Bytes that occur only in a chat's first event, which has no token; some servers send it before
they start."""
_TOKEN = re.compile(rb'"(?:text|content)": ?"')
_ROLE_TOKEN = re.compile(rb'"role": ?"\w+", ?"content": ?"')
"""Pattern of a token's event. Its text may be empty: an answer of random ids may have no text."""


NEVER_MS: Final = 1e9
"""Deadline of a request without one; a number, as JSON has no infinity."""


class StreamRequest(msgspec.Struct, frozen=True):
    """One streamed request, ``at_s`` after the start; its body requests the usage. Deadlines count
    from its arrival."""

    at_s: float
    deadline_ms: float
    body: dict[str, object]
    first_token_ms: float = NEVER_MS
    token_gap_ms: float = NEVER_MS
    headers: str = ""
    """More header lines, each with its end."""

    @property
    def patience_ms(self) -> float:
        """Time in ms that its client waits for a first event."""
        return min(self.deadline_ms, self.first_token_ms)

    def due_ms(self, token: int, first_came_ms: float) -> float:
        """Time when a token, counted from 1, is due by the deadlines stated for parts."""
        if token == 1:
            return self.first_token_ms
        if self.token_gap_ms >= NEVER_MS:
            return NEVER_MS
        begin = self.first_token_ms if self.first_token_ms < NEVER_MS else first_came_ms
        return begin + (token - 1) * self.token_gap_ms


_NOTHING = StreamRequest(0.0, NEVER_MS, {})


class OpenLoopPlan(msgspec.Struct, frozen=True):
    """Requests to send, and the server. ``with_deadline`` sends all deadlines to the service; they
    apply to an answer either way. With ``hang_up``, a client closes its connection at its deadline,
    or at its first token's deadline if no token has arrived; it still waits for later tokens that
    are late. In any case, all clients hang up ``linger_s`` after the last request is due."""

    host: str
    port: int
    path: str
    asks: list[StreamRequest]
    with_deadline: bool
    linger_s: float
    hang_up: bool = False


class Result(msgspec.Struct):
    """Outcome of one request. Seconds since it was due; ``end_s`` 0 if it never ended.

    ``late_s`` is the delay of its sending. ``status`` 0: no answer. ``code`` is the error's code,
    also for an error in the stream. ``complete``: the whole answer arrived; ``finish`` is its
    finish reason. ``tokens`` counts events until the usage gives the exact number. ``missed`` is
    the first late part of the answer: ``first_token``, ``token_gap``, or nothing. ``gap_s`` is the
    longest time between two arrivals of tokens.
    """

    late_s: float = 0.0
    status: int = 0
    code: str = ""
    first_s: float = 0.0
    end_s: float = 0.0
    tokens: int = 0
    complete: bool = False
    finish: str = ""
    missed: str = ""
    gap_s: float = 0.0


class _Connection(asyncio.Protocol):
    """One socket, for one request at a time; writes its response to a ``Result``."""

    def __init__(self, pool: "_Pool") -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._result: Result | None = None
        self._ask = _NOTHING
        self._due = 0.0
        self._head = b""
        self._tail = b""
        self._events = 0
        self._last = 0.0
        self._left: int | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, ask: StreamRequest, request: bytes, result: Result, due: float) -> None:
        """Send a request; write its response to ``result`` while its client waits."""
        assert self.transport is not None
        self._ask, self._result, self._due = ask, result, due
        self._head, self._tail, self._events, self._left, self._last = b"", b"", 0, None, 0.0
        result.late_s = self._pool.now() - due
        self.transport.write(request)
        self._wait(ask.patience_ms)

    def _wait(self, patience_ms: float) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._pool.hangs_up and patience_ms < NEVER_MS:
            until = self._due + patience_ms / 1000
            self._patience = asyncio.get_running_loop().call_at(until, self._hang_up)

    def _hang_up(self) -> None:
        assert self._result is not None and self.transport is not None
        self._result.code = HUNG_UP
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        """Stop waiting: later data belongs to no request."""
        self._result = None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def data_received(self, data: bytes) -> None:
        result = self._result
        if result is None:
            return
        if not result.status:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            result.status = int(head[9:12])
            length = CONTENT_LENGTH.search(head + b"\r\n")
            self._left = int(length[1]) if length is not None else None
        self._body(data, result)

    def _body(self, data: bytes, result: Result) -> None:
        now = self._pool.now() - self._due
        joined = self._tail + data
        events = data.count(_EVENT)
        if not result.first_s and result.status == 200:
            events -= data.count(_ROLE)
            if len(_TOKEN.findall(joined)) > len(_ROLE_TOKEN.findall(joined)):
                result.first_s = now
                self._wait(self._ask.deadline_ms)
        if events:
            result.gap_s = max(result.gap_s, now - (self._last or now))
            self._last = now if result.first_s else 0.0
            self._judge(result, self._events + 1, now)
        self._events += events
        self._tail = joined[-TAIL:]
        if self._left is not None:
            self._left -= len(data)
            ended = self._left <= 0
        else:
            ended = self._tail.endswith(LAST_BYTES)
        result.tokens = self._events
        if ended:
            self._finish(result, now)

    def _judge(self, result: Result, token: int, now: float) -> None:
        """Record a miss if the first of the tokens that just arrived was late; the others are due
        later."""
        if not result.missed and 1000 * now > self._ask.due_ms(token, 1000 * result.first_s):
            result.missed = FIRST_TOKEN if token == 1 else TOKEN_GAP

    def _finish(self, result: Result, now: float) -> None:
        result.end_s = now
        usage = USAGE.findall(self._tail)
        finish = _FINISH.findall(self._tail)
        result.finish = finish[-1].decode() if finish else ""
        result.complete = result.status == 200 and b"[DONE]" in self._tail
        if result.complete:
            result.first_s = result.first_s or now  # nothing but an end token
            result.tokens = int(usage[-1])
        else:
            result.tokens = max(0, self._events - 1)  # the last one is the error
            code = _CODE.search(self._tail)
            result.code = code[1].decode() if code else "unknown"
        self._forget()
        self._pool.free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._result is not None and not self._pool.closing:
            self._result.code = "connection_lost"
            self._result.end_s = self._pool.now() - self._due
        self._forget()
        self._pool.drop(self)


class _Pool:
    """Connections that wait for their next request."""

    def __init__(self, host: str, port: int, hangs_up: bool) -> None:
        self._host, self._port = host, port
        self.hangs_up = hangs_up
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._ended = asyncio.Event()
        self.closing = False
        self.now = self._loop.time

    async def take(self) -> _Connection:
        if self._idle:
            return self._idle.pop()
        _, connection = await self._loop.create_connection(
            lambda: _Connection(self), self._host, self._port
        )
        self._all.add(connection)
        return connection

    def free(self, connection: _Connection) -> None:
        self._idle.append(connection)
        self._ended.set()

    def drop(self, connection: _Connection) -> None:
        self._all.discard(connection)
        self._idle = [each for each in self._idle if each is not connection]
        self._ended.set()

    async def wait_idle(self, limit_s: float) -> None:
        """Wait until every connection is idle, or the time is up."""
        end = self.now() + limit_s
        while len(self._idle) < len(self._all) and (left := end - self.now()) > 0:
            self._ended.clear()
            try:
                await asyncio.wait_for(self._ended.wait(), left)
            except TimeoutError:
                return

    def hang_up(self) -> None:
        self.closing = True
        for connection in list(self._all):
            if connection.transport is not None:
                connection.transport.abort()


async def run(plan: OpenLoopPlan) -> list[Result]:
    """Run the whole load; returns results in the order of the requests."""
    requests = [_request(plan, ask) for ask in plan.asks]
    results = [Result() for _ in plan.asks]
    pool = _Pool(plan.host, plan.port, plan.hang_up)
    sending: set[asyncio.Task[None]] = set()
    began = pool.now() + 0.05
    for ask, request, result in zip(plan.asks, requests, results, strict=True):
        due = began + ask.at_s
        if (left := due - pool.now()) > 0:
            await asyncio.sleep(left)
        task = asyncio.create_task(_send(pool, ask, request, result, due))
        sending.add(task)
        task.add_done_callback(sending.discard)
    await asyncio.gather(*sending)
    await pool.wait_idle(plan.linger_s)
    pool.hang_up()
    await asyncio.sleep(0)
    return results


async def _send(
    pool: _Pool, ask: StreamRequest, request: bytes, result: Result, due: float
) -> None:
    try:
        connection = await pool.take()
    except OSError as error:
        result.code, result.end_s = f"connect: {error}", pool.now() - due
        return
    connection.ask(ask, request, result, due)


def _request(plan: OpenLoopPlan, ask: StreamRequest) -> bytes:
    deadlines = "".join(
        f"{name}: {value}\r\n"
        for name, value in (
            ("X-Timeout-Ms", ask.deadline_ms),
            ("X-First-Token-Timeout-Ms", ask.first_token_ms),
            ("x-llm-d-slo-tpot-ms", ask.token_gap_ms),
        )
        if plan.with_deadline and value < NEVER_MS
    )
    return request_bytes(plan.host, plan.port, "POST", plan.path, ask.body, deadlines + ask.headers)


@contextmanager
def running_first() -> Iterator[None]:
    """Run the body, and the processes that it starts, with priority for CPU time, if permitted.

    Real clients are on other machines. Next to a server that uses every core, this process waited
    up to 3 s for a CPU, so it sent requests late, and read answers late.
    """
    try:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def main() -> int:
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=OpenLoopPlan)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.disable()  # a pause would look like the service's
    with running_first():
        sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(plan))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
