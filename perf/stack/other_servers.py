"""Servers of other kinds for lanes to stand in front of, whose tokens cost next to nothing.

    python -m perf.stack.other_servers PORT STEP_MS

One process speaks the APIs of vLLM's, llama.cpp's and text-generation-inference's servers, as far
as lanes ask. Like an engine it goes in steps, and each step gives every stream one token, as an
event and a write of its own. ``GET /stops`` tells when it noticed of each stream that nobody was
left to read it, on the machine's monotonic clock. Bare asyncio: it shares the cores with what is
measured.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from perf.load.connection import CONTENT_LENGTH

TOKEN_ID: Final = 300
_TEXT: Final = " tide"
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_CONTEXT: Final = 100_000


class _Parameters(msgspec.Struct):
    max_new_tokens: int = 0


class _Asked(msgspec.Struct):
    max_tokens: int = 0
    n_predict: int = 0
    parameters: _Parameters | None = None

    @property
    def tokens(self) -> int:
        told = self.max_tokens or self.n_predict
        return told or (0 if self.parameters is None else self.parameters.max_new_tokens)


def _chunk(event: object) -> bytes:
    payload = event if isinstance(event, bytes) else msgspec.json.encode(event)
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _vllm(made: int, is_last: bool) -> bytes:
    choice = {
        "index": 0,
        "text": _TEXT,
        "logprobs": None,
        "finish_reason": "length" if is_last else None,
        "stop_reason": None,
        "token_ids": [TOKEN_ID],
    }
    event = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "choices": [choice]}
    return _chunk(event) + (_chunk(b"[DONE]") if is_last else b"")


def _llamacpp(made: int, is_last: bool) -> bytes:
    counts = {"tokens_predicted": made, "tokens_evaluated": 4}
    piece = {"index": 0, "content": _TEXT, "tokens": [TOKEN_ID], "stop": False, **counts}
    last = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "limit", **counts}
    return _chunk(piece) + (_chunk(last) if is_last else b"")


def _tgi(made: int, is_last: bool) -> bytes:
    token = {"id": TOKEN_ID, "text": _TEXT, "logprob": -0.5, "special": False}
    details = {"finish_reason": "length", "generated_tokens": made, "input_length": 4}
    event = {"index": made, "token": token, "details": details if is_last else None}
    return _chunk(event)


_STREAMS: Final[dict[bytes, Callable[[int, bool], bytes]]] = {
    b"/v1/completions": _vllm,
    b"/completion": _llamacpp,
    b"/generate_stream": _tgi,
}
_TOLD: Final[dict[bytes, object]] = {
    b"/version": {"version": "0.32.0"},
    b"/v1/models": {"data": [{"id": "demo", "max_model_len": _CONTEXT}]},
    b"/props": {
        "total_slots": 64,
        "model_path": "demo.gguf",
        "default_generation_settings": {"n_ctx": _CONTEXT},
    },
    b"/info": {"model_id": "demo", "version": "3.3.0", "max_total_tokens": _CONTEXT},
}


class _Engine:
    """Steps through the streams that run; asleep while there are none."""

    def __init__(self, step_s: float) -> None:
        self.stops: list[float] = []
        self._step_s = step_s
        self._streams: set[_Connection] = set()
        self._due = 0.0
        self._stepping = False
        self._loop = asyncio.get_running_loop()

    def add(self, stream: "_Connection") -> None:
        self._streams.add(stream)
        if not self._stepping:
            self._stepping = True
            self._due = self._loop.time()
            self._later()

    def gone(self, stream: "_Connection") -> None:
        if stream in self._streams:
            self._streams.discard(stream)
            self.stops.append(time.monotonic())

    def _later(self) -> None:
        # On an absolute schedule: a late step does not delay those after it.
        self._due = max(self._due + self._step_s, self._loop.time())
        self._loop.call_at(self._due, self._step)

    def _step(self) -> None:
        for stream in [each for each in self._streams if each.step()]:
            self._streams.discard(stream)
        self._stepping = bool(self._streams)
        if self._stepping:
            self._later()


class _Connection(asyncio.Protocol):
    """Requests one after another on one socket."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._received = b""
        self._event: Callable[[int, bool], bytes] = _vllm
        self._made = self._wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.gone(self)

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
        path = head.split(b" ", 2)[1]
        if head.startswith(b"POST"):
            self._event = _STREAMS[path]
            self._made, self._wanted = 0, msgspec.json.decode(rest[:size], type=_Asked).tokens
            self._transport.write(_HEAD)
            self._engine.add(self)
        else:
            stops = self._engine.stops
            self._answer(stops if path == b"/stops" else _TOLD.get(path, {}))
            if b"connection: close" in head.lower():
                self._transport.close()

    def step(self) -> bool:
        """Send a token; whether that was the last."""
        self._made += 1
        is_last = self._made == self._wanted
        self._transport.write(self._event(self._made, is_last) + (b"0\r\n\r\n" if is_last else b""))
        return is_last

    def _answer(self, value: object) -> None:
        body = msgspec.json.encode(value)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


async def serve(port: int, step_ms: float) -> asyncio.Server:
    """Listen on a port of the loopback interface; 0 takes a free one."""
    engine = _Engine(step_ms / 1000)
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Connection(engine), "127.0.0.1", port)


async def _main() -> None:
    server = await serve(int(sys.argv[1]), float(sys.argv[2]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
