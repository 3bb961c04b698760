"""CPU of the kernel alone to write one event to each of several clients: the floor of relaying.

No stream with one write per token costs less than this, in whatever language: a ``send`` on a
loopback connection whose reader waits for it. The reader is a process of its own, and its CPU is
not counted.
"""

import asyncio
import multiprocessing
import select
import socket
import statistics
import time

from perf.load.connection import HOST
from perf.report.bundle import Figure

_EVENT_BYTES = 200
"""Bytes of an event, about as many as an OpenAI chunk of one token has."""
_ROUNDS = 5
_ROUND_S = 0.5


async def bare_writes(prefix: str, clients: int, step_s: float) -> Figure:
    """Figure of ``us_per_write``, to stand beside what a service takes per token."""
    costs = await asyncio.to_thread(us_per_write, clients, _EVENT_BYTES, step_s)
    return Figure.of(f"{prefix}.bare_write_us", "the write alone, by the kernel", "µs/write", costs)


def us_per_write(clients: int, event_bytes: int, step_s: float) -> list[float]:
    """CPU of the writing thread per write, in µs, of rounds in which each of ``clients`` gets an
    event of ``event_bytes`` every ``step_s``."""
    with socket.create_server((HOST, 0), backlog=clients) as listener:
        reader = multiprocessing.get_context("spawn").Process(
            target=_read, args=(listener.getsockname()[1], clients), daemon=True
        )
        reader.start()
        connections = [listener.accept()[0] for _ in range(clients)]
    try:
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        event = b"x" * event_bytes
        return [_round(connections, event, step_s) for _ in range(_ROUNDS)]
    finally:
        for connection in connections:
            connection.close()
        reader.join(10)
        reader.kill()


def _round(connections: list[socket.socket], event: bytes, step_s: float) -> float:
    writes = [connection.send for connection in connections]
    costs: list[float] = []
    until = time.monotonic() + _ROUND_S
    while not costs or time.monotonic() < until:
        begun = time.thread_time()
        for write in writes:
            write(event)
        costs.append(time.thread_time() - begun)
        time.sleep(step_s)
    return 1e6 * statistics.fmean(costs) / len(connections)


def _read(port: int, clients: int) -> None:
    poll = select.epoll()
    connections = {}
    for _ in range(clients):
        connection = socket.create_connection((HOST, port))
        connections[connection.fileno()] = connection
        poll.register(connection.fileno(), select.EPOLLIN)
    while connections:
        for number, _ in poll.poll():
            if not connections[number].recv(65536):
                poll.unregister(number)
                connections.pop(number).close()
