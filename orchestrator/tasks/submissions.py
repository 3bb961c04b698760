"""Repeated submissions: one task per key that a client gives (``Idempotency-Key``)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from orchestrator.errors import KeyInUse, KeyReused


class Named(Protocol):
    """A task, or a clip."""

    id: str


T = TypeVar("T", bound=Named)


class Store(Protocol[T]):
    """Keeps tasks or clips."""

    on_forget: list[Callable[[T], None]]

    def __contains__(self, task: T) -> bool:
        """Whether it is kept."""

    def prune(self) -> None:
        """Forget what is over a bound."""


class SubmissionKey(NamedTuple):
    """A client's own name for its submission, which is valid with its own token only."""

    token: str
    name: str


class Submitted(NamedTuple, Generic[T]):
    """The task of a submission; ``is_repeated`` if it had been submitted before."""

    task: T
    is_repeated: bool


@dataclass(slots=True)
class _Entry(Generic[T]):
    digest: bytes
    task: T | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class Submissions(Generic[T]):
    """Remembers a key for as long as the store keeps its task or clip."""

    def __init__(self, store: Store[T]) -> None:
        self._store = store
        self._entries: dict[SubmissionKey, _Entry[T]] = {}
        self._keys: dict[str, SubmissionKey] = {}
        store.on_forget.append(self._forget)

    def __len__(self) -> int:
        return len(self._entries)

    async def once(
        self,
        key: SubmissionKey,
        digest: bytes,
        submit: Callable[[], Awaitable[T]],
        *,
        wait_s: float,
        before: Callable[[], Awaitable[T | None]] | None = None,
    ) -> Submitted[T]:
        """The key's task; ``submit`` makes it, unless it has been made. ``digest`` is the body's.
        ``before`` looks for one that is no longer known here.

        A submission that comes while another one is being decided waits for that, ``wait_s`` at
        most. A refusal is not a task: it keeps no key. Raises what ``submit`` raises, ``KeyReused``
        and ``KeyInUse``.
        """
        self._store.prune()  # an expired task is gone for its clients
        try:
            async with asyncio.timeout(wait_s):
                known = await self._known(key, digest)
        except TimeoutError:
            raise KeyInUse(
                "the first submission with this Idempotency-Key is still being looked at; "
                "send it again, with a later deadline"
            ) from None
        if known is not None:
            return Submitted(known, is_repeated=True)
        entry = self._entries[key] = _Entry[T](digest)
        try:
            task = None if before is None else await before()
            if task is not None:  # it keeps no key here, for ``before`` finds it again
                return Submitted(task, is_repeated=True)
            task = await submit()
            if task in self._store:  # else it ended so soon that it is forgotten
                entry.task = task
                self._keys[task.id] = key
        finally:
            if entry.task is None:
                del self._entries[key]
            entry.decided.set()
        return Submitted(task, is_repeated=False)

    async def _known(self, key: SubmissionKey, digest: bytes) -> T | None:
        """The key's task, once it is decided; None if it has none. Raises ``KeyReused``."""
        while (entry := self._entries.get(key)) is not None:
            if entry.digest != digest:
                raise KeyReused.by_header()
            if entry.task is not None:
                return entry.task
            await entry.decided.wait()
        return None

    def _forget(self, task: T) -> None:
        key = self._keys.pop(task.id, None)
        if key is not None:
            del self._entries[key]
