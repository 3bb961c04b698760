"""Servers of other kinds for lanes to stand in front of, whose tokens cost next to nothing.

    python -m perf.stack.other_servers PORT STEP_MS

One process speaks the APIs of vLLM's, llama.cpp's and text-generation-inference's servers, as far
as lanes ask. Each step gives every stream one token. ``GET /stops`` tells when it noticed of each
stream that nobody was left to read it, on the machine's monotonic clock.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from perf.stack.stream_server import LAST_CHUNK, StepEngine, StreamConnection, chunk, main

TOKEN_ID: Final = 300
_TEXT: Final = " tide"
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
    return chunk(msgspec.json.encode(event)) + (chunk(b"[DONE]") if is_last else b"")


def _llamacpp(made: int, is_last: bool) -> bytes:
    counts = {"tokens_predicted": made, "tokens_evaluated": 4}
    piece = {"index": 0, "content": _TEXT, "tokens": [TOKEN_ID], "stop": False, **counts}
    last = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "limit", **counts}
    return chunk(msgspec.json.encode(piece)) + (
        chunk(msgspec.json.encode(last)) if is_last else b""
    )


def _tgi(made: int, is_last: bool) -> bytes:
    token = {"id": TOKEN_ID, "text": _TEXT, "logprob": -0.5, "special": False}
    details = {"finish_reason": "length", "generated_tokens": made, "input_length": 4}
    event = {"index": made, "token": token, "details": details if is_last else None}
    return chunk(msgspec.json.encode(event))


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


class LaneConnection(StreamConnection):
    """Connection of a lane, of whichever kind it asks for."""

    def __init__(self, engine: StepEngine) -> None:
        super().__init__(engine)
        self._event: Callable[[int, bool], bytes] = _vllm
        self._made = self._wanted = 0

    def begin(self, path: bytes, body: bytes) -> None:
        self._event = _STREAMS[path]
        self._made, self._wanted = 0, msgspec.json.decode(body, type=_Asked).tokens

    def step(self) -> bool:
        self._made += 1
        is_last = self._made == self._wanted
        self.transport.write(self._event(self._made, is_last) + (LAST_CHUNK if is_last else b""))
        return is_last

    def told(self, path: bytes) -> object:
        return self.engine.stops if path == b"/stops" else _TOLD.get(path, {})


if __name__ == "__main__":
    main(LaneConnection)
