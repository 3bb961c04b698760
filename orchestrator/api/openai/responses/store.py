"""Responses that clients may fetch again, or continue from: the latest, within bounds."""

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from sys import getsizeof
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.openai.errors import error_body
from orchestrator.api.openai.responses.replay import Pieces
from orchestrator.clock import Clock
from orchestrator.errors import InstanceLost, NotFound
from orchestrator.retention import ItemCall, OwnedStore, Retention, ignore
from orchestrator.tasks.image import kept_bytes
from orchestrator.tasks.job import Message
from protocol import excerpt

KEPT_RESPONSES: Final = Retention(keep_count=1000, keep_s=3600.0, keep_bytes=64 * 2**20)
"""What is kept of answers, and, beside them, of conversations. One takes what its text does, with
each of its answers."""
_OWN_BYTES = 512
_MESSAGE_BYTES = 128
"""Bytes that keeping takes: a response beside its body, and each of its messages beside the
text."""
_CALL_BYTES = 64
"""Bytes per character of a call's arguments, which are kept decoded."""


class RunningResponse(Protocol):
    """A response that is made in the background."""

    @property
    def history(self) -> tuple[Message, ...]:
        """The turns that it is made from, without instructions."""

    def body(self) -> bytes:
        """The response as JSON, in its current state."""

    def cancel(self) -> None:
        """End the response; it is kept then."""

    def follow(self, stream: EventStream, after: int) -> Iterator[bytes]:
        """Yield the events so far whose number is above ``after``, and send ``stream`` those that
        come, until it ``leave``s."""

    def leave(self, stream: EventStream) -> None:
        """Send a stream no more. Idempotent."""


class Stored(NamedTuple):
    """A response that has ended: its body as JSON, the turns that it was made from, without its
    instructions, and those that it added."""

    body: bytes
    history: tuple[Message, ...]
    answer: tuple[Message, ...] = ()
    pieces: tuple[Pieces, ...] = ()
    """How the texts of its output came."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation up to and including the response."""
        return (*self.history, *self.answer)


class StoredCopy(msgspec.Struct, frozen=True, array_like=True):
    """The copy of a response, by which another orchestrator has it."""

    body: bytes
    history: tuple[Message, ...]
    answer: tuple[Message, ...]
    pieces: tuple[tuple[int, bytes], ...]


class ResponseStore:
    """Responses by key and id."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        self.keep_s = retention.keep_s
        self.on_change: ItemCall = ignore
        """Called with the key and name of a response that has begun, has ended, or is gone."""
        self.on_use: ItemCall = ignore
        """Never called: a response is not kept for longer because somebody reads it."""
        self._running: dict[tuple[str, str], RunningResponse] = {}
        self._ended: OwnedStore[Stored] = OwnedStore(clock, retention)
        self._ended.on_change = lambda key, name: self.on_change(key, name)

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def kept_bytes(self) -> int:
        return self._ended.kept_bytes

    def begin(self, key: str, name: str, running: RunningResponse) -> None:
        """Let a background response be fetched until it ends; ``put`` must follow."""
        self._running[key, name] = running
        self.on_change(key, name)

    def put(self, key: str, name: str, stored: Stored) -> None:
        """Keep a response that has just ended. One that is larger than all of the room is not
        kept."""
        self._running.pop((key, name), None)
        self._ended.put(key, name, stored, _kept_bytes(stored))

    def get(self, key: str, name: str) -> Stored:
        """A response that has ended. Raises ``NotFound``."""
        stored = self._ended.get(key, name)
        if stored is None:
            raise _no_such_response(name)
        return stored

    def running(self, key: str, name: str) -> RunningResponse | None:
        """A background response that has not ended."""
        return self._running.get((key, name))

    def answer(self, key: str, name: str) -> Message | None:
        """The assistant's turn in a response; None if it is not kept, or said nothing."""
        stored = self._ended.get(key, name)
        return stored.answer[-1] if stored is not None and stored.answer else None

    def history(self, key: str, name: str) -> tuple[Message, ...]:
        """The turns that a response was or is made from. Raises ``NotFound``."""
        running = self._running.get((key, name))
        return self.get(key, name).history if running is None else running.history

    def body(self, key: str, name: str) -> bytes:
        """A response's body in its current state. Raises ``NotFound``."""
        running = self._running.get((key, name))
        return self.get(key, name).body if running is None else running.body()

    def cancel(self, key: str, name: str) -> bytes:
        """Cancel a background response; others stay as they are (WP-2). Returns the body
        afterwards. Raises ``NotFound``."""
        running = self._running.get((key, name))
        if running is not None:
            running.cancel()
        return self.body(key, name)

    def delete(self, key: str, name: str) -> None:
        """Delete a response, whether or not it has ended. Raises ``NotFound``."""
        running = self._running.get((key, name))
        if running is None:
            self.get(key, name)
        else:
            running.cancel()
        self._ended.drop(key, name)

    # ── copies, for when this orchestrator dies ──────────────────────────────────────────────

    def copier(self, key: str, name: str) -> Callable[[], bytes] | None:
        """Makes a copy of a response as it is now; None where it is not kept here any more."""
        running = self._running.get((key, name))
        if running is not None:
            return partial(_copied, Stored(running.body(), running.history))
        stored = self._ended.get(key, name)
        return None if stored is None else partial(_copied, stored)

    def adopt(self, key: str, name: str, copy: bytes) -> None:
        """Keep a response of another orchestrator. Raises ``msgspec.DecodeError``."""
        found = msgspec.msgpack.decode(copy, type=StoredCopy)
        pieces = tuple(Pieces(skipped, array("I", chars)) for skipped, chars in found.pieces)
        stored = _broken_off(Stored(found.body, found.history, found.answer, pieces))
        self._ended.adopt(key, name, stored, _kept_bytes(stored))

    def let_go(self, key: str, name: str) -> None:
        """Forget a response that another orchestrator has now."""
        self._ended.let_go(key, name)

    def names(self) -> Iterator[tuple[str, str]]:
        """Keys and names of all responses."""
        return chain(self._running, self._ended.names())


def _copied(stored: Stored) -> bytes:
    pieces = tuple((own.skipped, own.chars.tobytes()) for own in stored.pieces)
    copy = StoredCopy(stored.body, stored.history, stored.answer, pieces)
    return msgspec.msgpack.encode(copy)


def _broken_off(stored: Stored) -> Stored:
    """A response as it is without the orchestrator that made it: one that had not ended has
    failed."""
    body: dict[str, Any] = msgspec.json.decode(stored.body)
    if body["status"] not in ("queued", "in_progress"):
        return stored
    error = InstanceLost("the orchestrator that made this response is gone; create it again")
    body |= {"status": "failed", "error": error_body(error)["error"], "output": []}
    return Stored(msgspec.json.encode(body), stored.history)


def _kept_bytes(stored: Stored) -> int:
    """Approximate memory that a response takes. What conversations have in common counts in each,
    because it lives as long as the last of them."""
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
    lengths = sum(getsizeof(own.chars) for own in stored.pieces)
    own = _OWN_BYTES + len(stored.body) + _MESSAGE_BYTES * len(messages)
    return own + texts + images + calls + lengths


def _no_such_response(name: str) -> NotFound:
    """The answer for an unknown id, and for a response that is not the caller's."""
    error = NotFound(
        f"there is no response {excerpt(name, 64)!r}; they are kept for a while only, and not with "
        "store: false"
    )
    error.item_id = name
    return error
