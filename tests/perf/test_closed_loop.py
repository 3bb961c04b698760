"""The load generator counts every token, and notices each one that is missing."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from perf.load.closed_loop import ClosedLoopPlan, LoadFailed, run
from tests.support.cases import for_each

TOKENS = 40


def events(tokens: int, reported: int) -> list[bytes]:
    chunks = [{"choices": [{"text": "a data: b"}]} for _ in range(tokens)]
    usage = {"choices": [], "usage": {"completion_tokens": reported}}
    bodies = [json.dumps(body).encode() for body in (*chunks, usage)]
    return [b"data: " + body + b"\n\n" for body in [*bodies, b"[DONE]"]]


def chunked(parts: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in [*parts, b""])


@contextmanager
def server(response: bytes, cut: int) -> Iterator[int]:
    """Answers every request with ``response`` in pieces of ``cut`` bytes; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            try:
                while connection.recv(65536):
                    for start in range(0, len(response), cut):
                        connection.sendall(response[start : start + cut])
            except ConnectionError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()


def plan(port: int, **changes: object) -> ClosedLoopPlan:
    fields: dict[str, object] = {
        "host": "127.0.0.1",
        "port": port,
        "path": "/v1/completions",
        "body": {"max_tokens": TOKENS},
        "clients": 3,
        "overhead_events": 2,
        "warm_s": 0.02,
        "window_s": 0.05,
        "windows": 2,
        "watch": {"me": os.getpid()},
    }
    return ClosedLoopPlan(**(fields | changes))  # type: ignore[arg-type]


@for_each(("cut", "poll_ms"), [(3, 0.0), (50, 1.0), (100_000, 0.0)])
def test_every_token_is_counted_however_the_stream_is_cut(cut: int, poll_ms: float) -> None:
    with server(chunked(events(TOKENS, TOKENS)), cut) as port:
        result = run(plan(port, poll_ms=poll_ms))
    assert result.requests >= 3
    assert result.tokens == result.requests * TOKENS
    assert len(result.windows) == 2
    assert all(window.cpu_s["me"] >= 0 for window in result.windows)


@for_each(("tokens", "reported"), [(TOKENS - 1, TOKENS), (TOKENS, TOKENS - 1)])
def test_a_missing_or_extra_token_is_an_error(tokens: int, reported: int) -> None:
    with (
        server(chunked(events(tokens, reported)), 1000) as port,
        pytest.raises(LoadFailed, match=f"{TOKENS} tokens"),
    ):
        run(plan(port))
