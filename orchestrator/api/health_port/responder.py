"""Answers health checks for an orchestrator, in its own process.

    orchestrator ──(stdin: a pipe)──▶ responder ◀── HTTP ── kubelet, load balancer

A line of JSON on stdin has all answers, by path: ``{"/health/live": [200, "…"], …}``; an empty line
says that the event loop is alive. When no line comes for 5 s the loop hangs, and every check is
answered 503 ``stalled``: the responder's own life says nothing about the orchestrator. It ends when
stdin does, so it never outlives the orchestrator, however that ends.

Standard library only, run as ``python -I -S responder.py FD`` with a listening socket as
file ``FD``: it is up in some 30 ms and takes about 10 MB.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

MAX_CONNECTIONS = 256
"""Most connections at a time; beyond that, the one that has been silent for longest is closed."""
STALLED_AFTER_S = 5.0
"""Seconds without a line after which the event loop counts as hung."""
HEAD_BYTES = 8192
IDLE_S = 60.0
_LOOK_EVERY_S = 5.0
_ACCEPTS_AT_ONCE = 64
_OUT_OF_FILES_S = 0.01
_READ_S = 0.02
_READ_BYTES = 65536

Answer = tuple[int, bytes]


class Answers:
    """The answers to health checks, valid for as long as the orchestrator is heard from."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._by_path: Mapping[str, tuple[int, str]] = {}
        self._pending = b""

    def take(self, data: bytes, now: float) -> None:
        """Take bytes from the pipe. Of several whole lines, the last one with answers counts."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if lines:
            self._heard_at = now
        latest = next((line for line in reversed(lines) if line), None)
        if latest is not None:
            self._by_path = json.loads(latest)

    def of(self, path: str, now: float) -> Answer:
        """Status and JSON body for a check of ``path``."""
        silent_s = now - self._heard_at
        if self._by_path and path not in self._by_path:
            known = ", ".join(sorted(self._by_path))
            return 404, _error("not_found", f"this port serves health checks: {known}")
        if silent_s > STALLED_AFTER_S:
            return 503, json.dumps({"status": "stalled", "silent_s": round(silent_s, 1)}).encode()
        if not self._by_path:
            return 503, b'{"status":"starting"}'
        status, body = self._by_path[path]
        return status, body.encode()


class Exchange:
    """The bytes of one connection: requests in, responses out, in order."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._unread = b""
        self.unsent = b""
        self.is_last = False
        """Whether the connection ends once all is sent; nothing more is read then."""

    def receive(self, data: bytes) -> None:
        # Empty lines before a request are not part of it (RFC 9112, 2.2), and must not pile up.
        self._unread = (self._unread + data).lstrip(b"\r\n")

    def proceed(self, now: float) -> None:
        """Answer the next request, if it is whole. To be called only while nothing is unsent."""
        if self.is_last:
            return
        head, end, rest = self._unread.partition(b"\r\n\r\n")
        if len(head) > HEAD_BYTES:
            refusal = _error("invalid_request", f"a head may have {HEAD_BYTES} bytes")
            self._respond(431, refusal, is_last=True)
        elif end:
            self._unread = rest
            self._answer(head, now)

    def _answer(self, head: bytes, now: float) -> None:
        request_line, *lines = head.decode("latin-1").split("\r\n")
        parts = request_line.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            self._respond(400, _error("invalid_request", "expected HTTP/1.1"), is_last=True)
            return
        method, target, version = parts
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        connection = headers.get("connection", "")
        keeps = "keep-alive" in connection if version == "HTTP/1.0" else "close" not in connection
        if method in ("GET", "HEAD"):
            status, body = self._answers.of(target.partition("?")[0], now)
        else:
            status, body = 405, _error("method_not_allowed", "only GET and HEAD are served here")
        is_last = has_body or not keeps  # no body is ever read
        self._respond(status, body, is_last=is_last, is_head=method == "HEAD")

    def _respond(self, status: int, body: bytes, *, is_last: bool, is_head: bool = False) -> None:
        self.is_last = is_last
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
        self.unsent = head.encode() + b"\r\n" + (b"" if is_head else body)


class _Connection:
    def __init__(self, sock: socket.socket, answers: Answers, now: float) -> None:
        self.socket = sock
        self.exchange = Exchange(answers)
        self.heard_at = now


class HealthResponder:
    """Serves all connections with one thread and one selector: no socket ever blocks another."""

    def __init__(self, listener: socket.socket, pipe: int, answers: Answers) -> None:
        self._listener = listener
        self._pipe = pipe
        self._answers = answers
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        """Connections by file descriptor, the one that has been silent for longest first."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(pipe, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            ready = self._selector.select(_LOOK_EVERY_S)
            # News from the pipe is read before requests are answered.
            if any(key.fd == self._pipe for key, _ in ready):
                data = os.read(self._pipe, _READ_BYTES)
                if not data:
                    self._leave()
                    return
                self._answers.take(data, time.monotonic())
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd != self._pipe:
                    self._serve(key.fd)
            self._drop_idle()

    def _leave(self) -> None:
        """Answer what comes by now or right after, which would be reset."""
        for _ in range(MAX_CONNECTIONS // _ACCEPTS_AT_ONCE + 1):
            self._accept()
        for gone in (self._pipe, self._listener):
            self._selector.unregister(gone)
        self._listener.close()
        until = time.monotonic() + _READ_S
        while self._connections and (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                self._serve(key.fd)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files, on the whole machine perhaps
                self._make_room()
                time.sleep(_OUT_OF_FILES_S)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._connections) >= MAX_CONNECTIONS:
                self._make_room()
            self._connections[sock.fileno()] = _Connection(sock, self._answers, time.monotonic())
            self._selector.register(sock, selectors.EVENT_READ)
            self._serve(sock.fileno())  # most have sent their request by now

    def _make_room(self) -> None:
        if self._connections:
            self._close(next(iter(self._connections)))

    def _serve(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:  # it was closed to make room for another
            return
        try:
            is_over = self._exchange(fd, connection)
        except OSError:
            is_over = True
        if is_over:
            self._close(fd)

    def _exchange(self, fd: int, connection: _Connection) -> bool:
        """Read, answer and send without waiting. Returns whether the connection is over. Nothing is
        read before all is sent, so that a client that does not read takes no memory."""
        exchange, now = connection.exchange, time.monotonic()
        if not exchange.unsent:
            with suppress(BlockingIOError):
                data = connection.socket.recv(_READ_BYTES)
                if not data:
                    return True
                connection.heard_at = now
                self._connections[fd] = self._connections.pop(fd)
                exchange.receive(data)
                exchange.proceed(now)
        while exchange.unsent:
            try:
                sent = connection.socket.send(exchange.unsent)
            except BlockingIOError:
                self._selector.modify(connection.socket, selectors.EVENT_WRITE)
                return False
            exchange.unsent = exchange.unsent[sent:]
            if not exchange.unsent:
                self._selector.modify(connection.socket, selectors.EVENT_READ)
                exchange.proceed(now)
        return exchange.is_last

    def _drop_idle(self) -> None:
        since = time.monotonic() - IDLE_S
        for fd, connection in list(self._connections.items()):
            if connection.heard_at > since:
                return
            self._close(fd)

    def _close(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _error(code: str, message: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": message, "retryable": False}}).encode()


def main() -> None:
    # A signal to the process group drains the orchestrator first, so answer until it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    answers = Answers(time.monotonic())
    HealthResponder(listener, sys.stdin.fileno(), answers).run()


if __name__ == "__main__":
    main()
