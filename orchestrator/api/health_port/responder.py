"""Answers health checks for an orchestrator, in its own process.

    orchestrator ──(stdin: a pipe)──▶ responder ◀── HTTP ── kubelet, load balancer

Each line of JSON on stdin has all answers by path: ``{"/health/live": [200, "…"], …}``. An empty
line is a heartbeat of the event loop. If no line arrives for 5 s, the loop is stalled: every check
gets 503 ``stalled``. The responder exits at the end of stdin, so it never outlives the
orchestrator, even if that crashes.

Uses only the standard library. Runs as ``python -I -S responder.py FD``; ``FD`` is the file
descriptor of a listening socket. Starts in about 50 ms and takes about 20 MB.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

MAX_CONNECTIONS = 256
"""Most connections at a time. Beyond that, the connection with the longest silence is closed."""
STALLED_AFTER_S = 5.0
"""Seconds without a line after which the event loop is considered stalled."""
HEAD_BYTES = 8192
IDLE_S = 60.0
_ACCEPT_S = 0.005
_READ_S = 0.02
_READ_BYTES = 65536

Answer = tuple[int, bytes]


class Answers:
    """The answers to health checks, valid while the orchestrator sends lines."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._by_path: Mapping[str, tuple[int, str]] = {}
        self._pending = b""

    def take(self, data: bytes, now: float) -> None:
        """Read bytes from the pipe. Of several complete lines, the last one with answers counts."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if lines:
            self._heard_at = now
        latest = next((line for line in reversed(lines) if line), None)
        if latest is not None:
            self._by_path = json.loads(latest)

    def of(self, path: str, now: float) -> Answer:
        """Status and JSON body of the answer for ``path``."""
        silent_s = now - self._heard_at
        if self._by_path and path not in self._by_path:
            known = ", ".join(sorted(self._by_path))
            return 404, _error("not_found", f"this port serves only health checks: {known}")
        if silent_s > STALLED_AFTER_S:
            return 503, json.dumps({"status": "stalled", "silent_s": round(silent_s, 1)}).encode()
        if not self._by_path:
            return 503, b'{"status":"starting"}'
        status, body = self._by_path[path]
        return status, body.encode()


class HealthResponder:
    """Serves all connections on one thread. No socket blocks another."""

    def __init__(self, listener: socket.socket, pipe: int, answers: Answers) -> None:
        self._listener = listener
        self._pipe = pipe
        self._answers = answers
        self._connections: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        """The task of each connection, longest silence first."""
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Answer checks until the pipe ends. Also answers checks that arrive just after that:
        their connections would be reset otherwise."""
        os.set_blocking(self._pipe, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe, self._read_pipe)
        server = await asyncio.start_server(
            self._serve, sock=self._listener, limit=HEAD_BYTES, backlog=MAX_CONNECTIONS
        )
        await self._ended.wait()
        loop.remove_reader(self._pipe)
        await asyncio.sleep(_ACCEPT_S)
        server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_READ_S)

    def _read_pipe(self) -> None:
        with suppress(BlockingIOError):
            if data := os.read(self._pipe, _READ_BYTES):
                self._answers.take(data, time.monotonic())
            else:
                self._ended.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Read nothing before everything is sent: a client that does not read takes no memory.
        writer.transport.set_write_buffer_limits(0)
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            self._connections.popitem(last=False)[0].cancel()
        self._connections[task] = None
        # The client is gone, was silent for too long, or makes room for another.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer_one(reader, writer):
                self._connections.move_to_end(task)
        self._connections.pop(task, None)
        writer.transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer the connection's next request. Returns whether more can follow. Raises ``OSError``
        and ``IncompleteReadError`` if the connection ends."""
        async with asyncio.timeout(IDLE_S):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                refusal = _error("invalid_request", f"a head may have at most {HEAD_BYTES} bytes")
                response, keeps = _response(431, refusal, is_last=True), False
            else:
                # Empty lines before a request are not part of it (RFC 9112, 2.2).
                if not (head := head.strip(b"\r\n")):
                    return True
                self._read_pipe()  # use the newest answers
                response, keeps = respond(head, self._answers, time.monotonic())
            writer.write(response)
            await writer.drain()
        return keeps


def respond(head: bytes, answers: Answers, now: float) -> tuple[bytes, bool]:
    """The response to a request with this head, and whether the connection stays open."""
    request_line, *lines = head.decode("latin-1").split("\r\n")
    parts = request_line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        refusal = _error("invalid_request", "expected HTTP/1.1")
        return _response(400, refusal, is_last=True), False
    method, target, version = parts
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    connection = headers.get("connection", "")
    keeps = "keep-alive" in connection if version == "HTTP/1.0" else "close" not in connection
    keeps = keeps and not has_body  # bodies are never read
    if method in ("GET", "HEAD"):
        status, body = answers.of(target.partition("?")[0], now)
    else:
        status, body = 405, _error("method_not_allowed", "only GET and HEAD are served here")
    return _response(status, body, is_last=not keeps, is_head=method == "HEAD"), keeps


def _response(status: int, body: bytes, *, is_last: bool, is_head: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        "Content-Type: application/json; charset=utf-8\r\n"
        "Cache-Control: no-store\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    if status == 405:
        head += "Allow: GET, HEAD\r\n"
    if is_last:
        head += "Connection: close\r\n"
    return head.encode() + b"\r\n" + (b"" if is_head else body)


def _error(code: str, message: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": message, "retryable": False}}).encode()


def main() -> None:
    # A signal to the process group drains the orchestrator first, so answer until it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    answers = Answers(time.monotonic())
    asyncio.run(HealthResponder(listener, sys.stdin.fileno(), answers).run())


if __name__ == "__main__":
    main()
