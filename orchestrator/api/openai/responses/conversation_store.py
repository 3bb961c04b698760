"""Conversations that clients keep here, each key's own, within bounds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import getsizeof
from uuid import uuid4

import msgspec

from orchestrator.api.openai.responses.kept_items import KeptItem
from orchestrator.clock import Clock
from orchestrator.errors import InvalidRequest
from orchestrator.retention import ItemCall, OwnedStore, Retention, ignore, no_such

_OWN_BYTES = 512
"""Bytes that keeping a conversation takes beside its items and metadata."""


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation, as far as it has gone."""

    created_unix: int
    metadata: dict[str, str]
    id: str = field(default_factory=lambda: f"conv_{uuid4().hex}")
    items: dict[str, KeptItem] = field(default_factory=dict)
    """Items by id, the oldest first."""
    items_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """Approximate memory that keeping it takes."""
        texts = (text for pair in self.metadata.items() for text in pair)
        return _OWN_BYTES + sum(map(getsizeof, texts)) + self.items_bytes

    def add(self, items: Iterable[KeptItem]) -> None:
        for item in items:
            self.items[item.id] = item
            self.items_bytes += item.kept_bytes

    def remove(self, item_id: str) -> None:
        self.items_bytes -= self.items.pop(item_id).kept_bytes

    def body(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_unix,
            "metadata": self.metadata,
        }


class ConversationCopy(msgspec.Struct, frozen=True, array_like=True):
    """The copy of a conversation, by which another orchestrator has it."""

    created_unix: int
    metadata: dict[str, str]
    items: tuple[KeptItem, ...]


class ConversationStore:
    """Conversations by key and id; each is dropped when it has not been used for a while."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        self.keep_s = retention.keep_s
        self.on_change: ItemCall = ignore
        """Called with the key and name of a conversation that is new, has changed, or is gone."""
        self.on_use: ItemCall = ignore
        """Called with the key and name of a conversation that was used."""
        self._kept: OwnedStore[Conversation] = OwnedStore(clock, retention)
        self._kept.on_change = lambda key, name: self.on_change(key, name)
        self._max_bytes = retention.keep_bytes

    def keep(self, key: str, conversation: Conversation) -> None:
        """Keep a conversation that is new or has changed. One that is larger than all of the room
        is dropped."""
        self._kept.put(key, conversation.id, conversation, conversation.kept_bytes)

    def create(self, key: str, conversation: Conversation) -> None:
        """Keep a new conversation. Raises ``InvalidRequest`` where there is no room for it."""
        self._require_room(conversation, ())
        self.keep(key, conversation)

    def get(self, key: str, name: str) -> Conversation:
        """A conversation of the key's, which counts as a use. Raises ``NotFound``."""
        conversation = self._kept.get(key, name)
        if conversation is None:
            raise no_such("conversation", name)
        self._kept.touch(key, name)
        self.on_use(key, name)
        return conversation

    def add(self, key: str, name: str, items: Sequence[KeptItem]) -> None:
        """Add a client's items. Raises ``NotFound``, and ``InvalidRequest`` if they are too
        large."""
        conversation = self.get(key, name)
        self._require_room(conversation, items)
        conversation.add(items)
        self.keep(key, conversation)

    def answered(self, key: str, name: str, items: Iterable[KeptItem]) -> None:
        """Add what was asked and answered, unless the conversation is gone meanwhile."""
        conversation = self._kept.get(key, name)
        if conversation is not None:
            conversation.add(items)
            self.keep(key, conversation)

    def delete(self, key: str, name: str) -> None:
        """Delete a conversation. Raises ``NotFound``."""
        self.get(key, name)
        self._kept.drop(key, name)

    # ── copies, for when this orchestrator dies ──────────────────────────────────────────────

    def copier(self, key: str, name: str) -> Callable[[], bytes] | None:
        """Makes a copy of a conversation as it is now; None where it is not kept here any more."""
        kept = self._kept.get(key, name)
        if kept is None:
            return None
        copy = ConversationCopy(kept.created_unix, dict(kept.metadata), tuple(kept.items.values()))
        return partial(msgspec.msgpack.encode, copy)

    def adopt(self, key: str, name: str, copy: bytes) -> None:
        """Keep a conversation of another orchestrator. Raises ``msgspec.DecodeError``."""
        found = msgspec.msgpack.decode(copy, type=ConversationCopy)
        conversation = Conversation(found.created_unix, found.metadata, name)
        conversation.add(found.items)
        self._kept.adopt(key, name, conversation, conversation.kept_bytes)

    def let_go(self, key: str, name: str) -> None:
        """Forget a conversation that another orchestrator has now."""
        self._kept.let_go(key, name)

    def names(self) -> Iterator[tuple[str, str]]:
        """Keys and names of all conversations."""
        return self._kept.names()

    def _require_room(self, conversation: Conversation, items: Iterable[KeptItem]) -> None:
        if conversation.kept_bytes + sum(item.kept_bytes for item in items) > self._max_bytes:
            raise InvalidRequest(
                f"a conversation must take at most {self._max_bytes} bytes", field="items"
            )
