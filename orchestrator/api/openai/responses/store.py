"""Responses that clients may fetch again, or continue from: the latest, within bounds."""

from collections.abc import Iterator
from sys import getsizeof
from typing import NamedTuple, Protocol

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.openai.responses.owned import OwnedStore
from orchestrator.api.openai.responses.replay import Pieces
from orchestrator.clock import Clock
from orchestrator.errors import NotFound
from orchestrator.retention import Retention
from orchestrator.tasks.job import Message
from worker.protocol import excerpt

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


class ResponseStore:
    """Responses by key and id."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        self._running: dict[tuple[str, str], RunningResponse] = {}
        self._ended: OwnedStore[Stored] = OwnedStore(clock, retention)

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def kept_bytes(self) -> int:
        return self._ended.kept_bytes

    @property
    def keeps_any(self) -> bool:
        """Whether any response may be kept at all."""
        return self._ended.keeps_any

    def begin(self, key: str, name: str, running: RunningResponse) -> None:
        """Let a background response be fetched until it ends; ``put`` must follow."""
        self._running[key, name] = running

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
    lengths = sum(getsizeof(own.chars) for own in stored.pieces)
    own = _OWN_BYTES + len(stored.body) + _MESSAGE_BYTES * len(messages)
    return own + texts + calls + lengths


def _no_such_response(name: str) -> NotFound:
    """The answer for an unknown id, and for a response that is not the caller's."""
    error = NotFound(
        f"there is no response {excerpt(name, 64)!r}; they are kept for a while only, and not with "
        "store: false"
    )
    error.item_id = name
    return error
