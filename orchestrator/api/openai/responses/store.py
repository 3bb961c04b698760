"""Keeps the latest responses, within bounds, for clients to fetch or continue."""

from collections.abc import Callable, Iterator
from functools import partial
from sys import getsizeof
from typing import Final, NamedTuple

import msgspec

from orchestrator.clock import Clock
from orchestrator.errors import NotFound
from orchestrator.retention import ItemCall, OwnedStore, Retention, ignore
from orchestrator.tasks.image import kept_bytes
from orchestrator.tasks.job import Message
from orchestrator.telemetry.metrics import Kept
from protocol import excerpt

KEPT_RESPONSES: Final = Retention(keep_count=1000, keep_s=3600.0, keep_bytes=64 * 2**20)
"""Bounds on kept responses. Each takes as much memory as its text."""
_OWN_BYTES = 512
_MESSAGE_BYTES = 128
"""Overhead in bytes: of a response, in addition to its body; of a message, to its text."""
_CALL_BYTES = 64
"""Bytes per character of a call's arguments. They are kept decoded."""


class Stored(NamedTuple):
    """An ended response: its body as JSON, its input turns without instructions, its own turns."""

    body: bytes
    history: tuple[Message, ...]
    answer: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation including the response."""
        return (*self.history, *self.answer)


class ResponseStore:
    def __init__(self, clock: Clock, retention: Retention) -> None:
        self.keep_s = retention.keep_s
        self.on_change: ItemCall = ignore
        """Called with the key and name of a response that ended or was removed."""
        self.on_use: ItemCall = ignore
        """Never called: reading a response does not extend its lifetime."""
        self._ended: OwnedStore[Stored] = OwnedStore(clock, retention)
        self._ended.on_change = lambda key, name: self.on_change(key, name)

    def kept(self) -> Kept:
        return self._ended.kept()

    def put(self, key: str, name: str, stored: Stored) -> None:
        """Keep a response that has just ended, unless it is larger than the whole store."""
        self._ended.put(key, name, stored, _kept_bytes(stored))

    def get(self, key: str, name: str) -> Stored:
        """The ended response with that name. Raises ``NotFound``."""
        stored = self._ended.get(key, name)
        if stored is None:  # unknown, or another key's
            error = NotFound(
                f"there is no response {excerpt(name, 64)!r}; they are kept only for a while, and "
                "not with store: false"
            )
            error.item_id = name
            raise error
        return stored

    def answer(self, key: str, name: str) -> Message | None:
        """The assistant's turn in a response; None if it is not kept or has no turn."""
        stored = self._ended.get(key, name)
        return stored.answer[-1] if stored is not None and stored.answer else None

    def delete(self, key: str, name: str) -> None:
        """Delete a response. Raises ``NotFound``."""
        self.get(key, name)
        self._ended.drop(key, name)

    # ── copies for other orchestrators, in case this one crashes ─────────────────────────────

    def copier(self, key: str, name: str) -> Callable[[], bytes] | None:
        """A function that copies the response's current state; None if it is no longer kept."""
        stored = self._ended.get(key, name)
        return None if stored is None else partial(msgspec.msgpack.encode, stored)

    def adopt(self, key: str, name: str, copy: bytes) -> None:
        """Keep another orchestrator's response. Raises ``msgspec.DecodeError``."""
        stored = msgspec.msgpack.decode(copy, type=Stored)
        self._ended.adopt(key, name, stored, _kept_bytes(stored))

    def let_go(self, key: str, name: str) -> None:
        """Forget a response that now belongs to another orchestrator."""
        self._ended.let_go(key, name)

    def names(self) -> Iterator[tuple[str, str]]:
        return self._ended.names()


def _kept_bytes(stored: Stored) -> int:
    """Approximate memory of a response, in bytes. Messages that several conversations share count
    in each, because they stay until the last of these conversations is removed."""
    messages = stored.messages
    texts = sum(
        getsizeof(text)
        for m in messages
        for text in (m.content, m.reasoning, m.call_id, m.name)
        if text
    )
    calls = sum(
        _CALL_BYTES * (1 + call.chars) + getsizeof(call.id) for m in messages for call in m.calls
    )
    images = sum(kept_bytes(m.parts) for m in messages if m.parts)
    own = _OWN_BYTES + len(stored.body) + _MESSAGE_BYTES * len(messages)
    return own + texts + images + calls
