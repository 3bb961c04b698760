"""A load generator for OpenAI event streams with a minimal cost of its own.

    python -m perf.load.closed_loop PLAN.json        prints a LoadResult as JSON

It shares the cores with the measured server, so it parses no JSON while it runs. It reads raw
sockets in one epoll loop, and counts events as bytes. It checks twice per request that every token
arrived: by the number of events, and by the usage that the stream reports.

Each client keeps one connection, and sends the next request when the last one has ended (closed
loop). After a warm-up, it measures rates, CPU time and gaps over fixed windows. It reads requests
that run at the end of the last window to their end.
"""

import selectors
import socket
import sys
import time
from pathlib import Path

import msgspec

from perf.load.connection import EVENT, LAST_BYTES, TAIL, USAGE, request_bytes
from perf.load.usage import process_cpu_s
from perf.report.stats import percentile

_DRAIN_S = 30.0


class LoadFailed(RuntimeError):
    """The server answered with an error, hung up, or lost a token."""


class ClosedLoopPlan(msgspec.Struct, frozen=True):
    """Requests to send, and how to measure them.

    ``overhead_events`` is the number of a stream's events without a token, including ``[DONE]``.
    With ``poll_ms`` 0, bytes are read as they arrive, to measure gaps. Above 0, the sockets are
    read at that interval, to measure throughput. ``watch`` has ids of processes for CPU time.
    """

    host: str
    port: int
    path: str
    body: dict[str, object]
    clients: int
    overhead_events: int
    warm_s: float = 1.0
    window_s: float = 1.0
    windows: int = 3
    poll_ms: float = 0.0
    watch: dict[str, int] = {}


class MeasuredWindow(msgspec.Struct, frozen=True):
    """One measured time window. Gaps are between consecutive reads of a stream with events."""

    seconds: float
    tokens: int
    cpu_s: dict[str, float]
    gap_p50_ms: float = 0.0
    gap_p95_ms: float = 0.0
    gap_p99_ms: float = 0.0


class LoadResult(msgspec.Struct, frozen=True):
    """Windows, and the totals of the whole run: all of ``tokens`` were seen as events."""

    windows: list[MeasuredWindow]
    requests: int
    tokens: int
    own_cpu_s: float


class SseClient:
    """One connection: sends the request, counts events, and finds the end of the response."""

    def __init__(self, plan: ClosedLoopPlan, request: bytes, max_tokens: int) -> None:
        self._plan = plan
        self._request = request
        self._max_tokens = max_tokens
        self.socket = socket.create_connection((plan.host, plan.port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._tail = b""
        self._events = 0
        self._last_at = 0.0
        self.busy = False

    def send(self) -> None:
        """Start the next request."""
        self._tail, self._events, self._last_at = b"", 0, 0.0
        self.busy = True
        self.socket.sendall(self._request)

    def receive(self, now: float, gaps: list[float] | None) -> int:
        """Read available data; return its number of events. Raises ``LoadFailed``."""
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return 0
        if not data:
            raise LoadFailed(f"the server hung up after {self._events} events")
        if not self._events:
            self._check_status(data)
        joined = self._tail + data if len(data) < TAIL else data
        count = data.count(EVENT) + (self._tail[-6:] + data[:6]).count(EVENT)
        self._tail = joined[-TAIL:]
        if count:
            self._events += count
            if gaps is not None and self._last_at:
                gaps.append(now - self._last_at)
                gaps.extend([0.0] * (count - 1))
            self._last_at = now
        if self._tail.endswith(LAST_BYTES):
            self._finish()
        return count

    def _check_status(self, data: bytes) -> None:
        head = self._tail + data
        if len(head) >= 12 and head[9:12] != b"200":
            raise LoadFailed(f"the server answered {head[:600].decode(errors='replace')!r}")

    def _finish(self) -> None:
        """Account for every token of the response that just ended. Raises ``LoadFailed``."""
        usage = USAGE.findall(self._tail)
        generated = int(usage[-1]) if usage else None
        expected = self._max_tokens + self._plan.overhead_events
        if generated != self._max_tokens or self._events != expected:
            raise LoadFailed(
                f"a stream of {self._max_tokens} tokens reported {generated} and had "
                f"{self._events} events instead of {expected}: {self._tail[-300:]!r}"
            )
        self.busy = False


def run(plan: ClosedLoopPlan) -> LoadResult:
    """Run the whole load in this thread. Raises ``LoadFailed`` if any token is missing."""
    max_tokens = plan.body["max_tokens"]
    if not isinstance(max_tokens, int):
        raise ValueError("body.max_tokens must be a number")
    request = request_bytes(plan.host, plan.port, "POST", plan.path, plan.body)
    clients = [SseClient(plan, request, max_tokens) for _ in range(plan.clients)]
    try:
        return _measure(plan, clients, max_tokens)
    finally:
        for client in clients:
            client.socket.close()


def _measure(plan: ClosedLoopPlan, clients: list[SseClient], max_tokens: int) -> LoadResult:
    reader = _Reader(plan, clients)
    for client in clients:
        client.send()
    reader.until(time.perf_counter() + plan.warm_s)
    windows = []
    for _ in range(plan.windows):
        gaps: list[float] = []
        begun, tokens = time.perf_counter(), reader.tokens
        cpu = {name: process_cpu_s(pid) for name, pid in plan.watch.items()}
        reader.until(begun + plan.window_s, gaps if plan.poll_ms == 0 else None)
        windows.append(
            MeasuredWindow(
                seconds=time.perf_counter() - begun,
                tokens=reader.tokens - tokens,
                cpu_s={name: process_cpu_s(pid) - cpu[name] for name, pid in plan.watch.items()},
                gap_p50_ms=percentile(gaps, 50) * 1000 if gaps else 0.0,
                gap_p95_ms=percentile(gaps, 95) * 1000 if gaps else 0.0,
                gap_p99_ms=percentile(gaps, 99) * 1000 if gaps else 0.0,
            )
        )
    reader.drain(time.perf_counter() + _DRAIN_S)
    return LoadResult(
        windows=windows,
        requests=reader.finished,
        tokens=reader.finished * max_tokens,
        own_cpu_s=time.process_time(),
    )


class _Reader:
    """Reads all clients, in rounds or as data comes, and keeps them busy."""

    def __init__(self, plan: ClosedLoopPlan, clients: list[SseClient]) -> None:
        self._clients = clients
        self._poll_s = plan.poll_ms / 1000
        self._overhead_events = plan.overhead_events
        self._selector = selectors.EpollSelector()
        for client in clients:
            self._selector.register(client.socket, selectors.EVENT_READ, client)
        self._events = 0
        self.finished = 0

    @property
    def tokens(self) -> int:
        """Tokens seen so far. A stream's events without tokens are subtracted at its end."""
        return self._events - self.finished * self._overhead_events

    def until(self, end: float, gaps: list[float] | None = None) -> None:
        """Read until ``end`` (``perf_counter`` seconds)."""
        while (now := time.perf_counter()) < end:
            self._round(end - now, gaps, again=True)

    def drain(self, end: float) -> None:
        """Read running streams to their end. Raises ``LoadFailed`` if they do not end in time."""
        while any(client.busy for client in self._clients):
            now = time.perf_counter()
            if now > end:
                raise LoadFailed("streams did not end after the last window")
            self._round(end - now, None, again=False)

    def _round(self, left_s: float, gaps: list[float] | None, *, again: bool) -> None:
        if self._poll_s:
            time.sleep(min(self._poll_s, left_s))
            ready = self._clients
        else:
            ready = [key.data for key, _ in self._selector.select(left_s)]
        now = time.perf_counter()
        for client in ready:
            if not client.busy:
                continue
            self._events += client.receive(now, gaps)
            if not client.busy:
                self.finished += 1
                if again:
                    client.send()


def main() -> int:
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ClosedLoopPlan)
    try:
        result = run(plan)
    except (LoadFailed, OSError) as error:
        print(f"load generator: {error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
