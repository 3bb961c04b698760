"""An OpenAI server for routers to stand in front of, whose tokens cost next to nothing.

    python -m perf.peers.mock PORT STEP_MS

Each step gives every stream one token. Steps are ``STEP_MS`` apart, or with 0 follow one another as
fast as the sockets take them.
"""

import time
from typing import Final

import msgspec

from perf.stack.stream_server import LAST_CHUNK, StepEngine, StreamConnection, chunk, main

_MODEL: Final = "demo"


class _Asked(msgspec.Struct):
    max_tokens: int = 16


def _event(text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": _MODEL,
        "choices": [choice],
    }
    return chunk(msgspec.json.encode(body))


_TOKEN: Final = _event(" tide", None)


def _ending(tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    last = msgspec.json.encode({"model": _MODEL, "choices": [], "usage": usage})
    return _event("", "length") + chunk(last) + chunk(b"[DONE]") + LAST_CHUNK


class ClientConnection(StreamConnection):
    """Connection of a client: it is sent nothing while it does not read."""

    def __init__(self, engine: StepEngine) -> None:
        super().__init__(engine)
        self._tokens = self._left = 0
        self._paused = False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def begin(self, path: bytes, body: bytes) -> None:
        self._tokens = self._left = msgspec.json.decode(body, type=_Asked).max_tokens

    def step(self) -> bool:
        if self._paused:
            return False
        self._left -= 1
        self.transport.write(_TOKEN)
        if self._left:
            return False
        self.transport.write(_ending(self._tokens))
        return True

    def told(self, path: bytes) -> object:
        """Answer to whatever a router asks before it trusts us: health and the one model."""
        model = {"id": _MODEL, "object": "model", "created": int(time.time()), "owned_by": "mock"}
        return {"object": "list", "data": [model]}


if __name__ == "__main__":
    main(ClientConnection)
