"""An OpenAI server for routers to stand in front of, whose tokens cost next to nothing.

    python -m perf.peers.mock PORT STEP_MS

Each step gives every stream one token, an event and a write of its own. Steps are ``STEP_MS``
apart, or with 0 follow one another as fast as the sockets take them. Bare asyncio, no framework: it
shares the cores with what is measured.
"""

import asyncio
import sys
import time
from typing import Final

import msgspec

from perf.load.connection import CONTENT_LENGTH

_MODEL: Final = "demo"
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)


class _Asked(msgspec.Struct):
    max_tokens: int = 16


def _chunk(payload: bytes) -> bytes:
    """A server-sent event as one chunk of a chunked body."""
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": _MODEL,
        "choices": [choice],
    }
    return _chunk(msgspec.json.encode(body))


_TOKEN: Final = _event(" tide", None)


def _ending(tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    last = msgspec.json.encode({"model": _MODEL, "choices": [], "usage": usage})
    return _event("", "length") + _chunk(last) + _chunk(b"[DONE]") + b"0\r\n\r\n"


class StepEngine:
    """Steps through the streams that run; asleep while there are none."""

    def __init__(self, step_s: float) -> None:
        self.streams: set[ClientConnection] = set()
        self._step_s = step_s
        self._due = 0.0
        self._stepping = False
        self._loop = asyncio.get_running_loop()

    def add(self, stream: "ClientConnection") -> None:
        """Give ``stream`` a token in each step from now on."""
        self.streams.add(stream)
        if not self._stepping:
            self._stepping = True
            self._due = self._loop.time()
            self._next()

    def _next(self) -> None:
        if self._step_s:
            # On an absolute schedule: a late step does not delay those after it.
            self._due = max(self._due + self._step_s, self._loop.time())
            self._loop.call_at(self._due, self._step)
        else:
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self.streams -= {each for each in self.streams if each.step()}
        self._stepping = bool(self.streams)
        if self._stepping:
            self._next()


class ClientConnection(asyncio.Protocol):
    """One socket's requests, one after another: a POST begins a stream, a GET is answered with the
    one model. A client is sent nothing while it does not read."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._received = b""
        self._tokens = self._left = 0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.streams.discard(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def step(self) -> bool:
        """Send a token; returns whether that was the last."""
        if self._paused:
            return False
        self._left -= 1
        self._transport.write(_TOKEN)
        if self._left:
            return False
        self._transport.write(_ending(self._tokens))
        return True

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = CONTENT_LENGTH.search(head + b"\r\n")
        size = int(length[1]) if length is not None else 0
        if len(rest) < size:
            return
        self._received = rest[size:]
        if head.startswith(b"POST"):
            self._tokens = self._left = msgspec.json.decode(rest[:size], type=_Asked).max_tokens
            self._transport.write(_HEAD)
            self._engine.add(self)
            return
        model = {"id": _MODEL, "object": "model", "created": int(time.time()), "owned_by": "mock"}
        body = msgspec.json.encode({"object": "list", "data": [model]})
        self._transport.write(_ANSWER % (len(body), body))
        if b"connection: close" in head.lower():
            self._transport.close()


async def serve(port: int, step_ms: float) -> asyncio.Server:
    """Listen on a port of the loopback interface; 0 takes a free one."""
    engine = StepEngine(step_ms / 1000)
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: ClientConnection(engine), "127.0.0.1", port)


async def _main() -> None:
    server = await serve(int(sys.argv[1]), float(sys.argv[2]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
