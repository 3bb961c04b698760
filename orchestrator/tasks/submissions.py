"""Repeated submissions: one task or clip per client key (``Idempotency-Key``)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from orchestrator.errors import KeyInUse, KeyReused
from orchestrator.retention import Keepable, KeptStore

T = TypeVar("T", bound=Keepable)


class SubmissionKey(NamedTuple):
    """A client's name for its submission, valid only with the same token."""

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
    """Remembers a key while the store keeps its task or clip."""

    def __init__(self, store: KeptStore[T]) -> None:
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
        """The key's task; ``submit`` creates it unless it exists. ``digest`` is the request body's.
        ``before`` looks for a task that is not known here.

        A submission that arrives while another with its key is decided waits for that, at most
        ``wait_s`` seconds. A refusal keeps no key. Raises ``KeyReused``, ``KeyInUse`` and the
        errors of ``submit``.
        """
        self._store.prune()  # clients can no longer get an expired task
        try:
            async with asyncio.timeout(wait_s):
                known = await self._known(key, digest)
        except TimeoutError:
            raise KeyInUse(
                "the first submission with this Idempotency-Key is still being processed; "
                "send it again with a later deadline"
            ) from None
        if known is not None:
            return Submitted(known, is_repeated=True)
        entry = self._entries[key] = _Entry[T](digest)
        try:
            task = None if before is None else await before()
            if task is not None:  # no key is kept here: ``before`` finds it again
                return Submitted(task, is_repeated=True)
            task = await submit()
            if task in self._store:  # otherwise it ended and was already removed
                entry.task = task
                self._keys[task.id] = key
        finally:
            if entry.task is None:
                del self._entries[key]
            entry.decided.set()
        return Submitted(task, is_repeated=False)

    async def _known(self, key: SubmissionKey, digest: bytes) -> T | None:
        """The key's task after it is decided; None if it has none. Raises ``KeyReused``."""
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
