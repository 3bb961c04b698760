"""Copies of what clients keep, so that it outlives its orchestrator: sessions and responses.

Each has one holder, which serves it from memory. A copy goes to the store soon after each change,
and no request waits for that::

    changed ─▶ 50 ms ─▶ a copy, unless another holds it ─▶ ``let_go`` here
    asked for where it is not known ─▶ its holder lives ─▶ the request is forwarded there
                                    ─▶ its holder is dead ─▶ claimed, and adopted from the copy

An orchestrator with an expired lease checks what others have claimed. Until then, for one renewal,
it answers with its old state.
"""

import asyncio
from collections.abc import Mapping
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from orchestrator.errors import NotReady
from orchestrator.ids import digits_of
from orchestrator.sharing import Copier, Shelf
from orchestrator.state import connection, scripts
from orchestrator.state.members import Members
from orchestrator.state.tasks import SharedTasks
from orchestrator.telemetry.log import fields, service_log

FLUSH_S = 0.05
"""How long a change waits for others, in seconds, before it is written."""
RETRY_S = 1.0
ITEMS_AT_A_TIME = 32
MAX_NOTED = 65_536
"""Most items that wait for the store while it is away. It forgets older ones by itself, with their
retention."""
CLOSE_WAIT_S = 2.0


class Change(IntEnum):
    """The pending write of an item, least first."""

    CHECK = 0
    """Whether the item is still held here."""
    USE = 1
    """The item is kept for longer, because it was used."""
    WHOLE = 2
    """All of the item, which has changed or is gone."""


class _Noted(NamedTuple):
    kind: str
    key: str
    change: Change


class SharedItems:
    """Copies the items of this orchestrator, and adopts those of dead ones."""

    def __init__(self, members: Members, tasks: SharedTasks) -> None:
        self.adopted = 0
        """How many items of other orchestrators were taken on."""
        self._members = members
        self._names = tasks.names
        self._tag = tasks.tag
        self._shelves: dict[str, Shelf] = {}
        self._noted: dict[str, _Noted] = {}
        """Pending writes, by name."""
        self._writing: asyncio.Task[None] | None = None
        self._is_failing = False
        members.on_lapsed.append(self._check_all)

    @property
    def waiting(self) -> int:
        """How many items the store lacks the present state of."""
        return len(self._noted)

    def add(self, kind: str, shelf: Shelf) -> None:
        """Copy the items of a shelf; ``kind`` is what the store calls them."""
        self._shelves[kind] = shelf
        shelf.on_change = lambda key, name: self._note(_Noted(kind, key, Change.WHOLE), name)
        shelf.on_use = lambda key, name: self._note(_Noted(kind, key, Change.USE), name)

    async def close(self) -> None:
        """Write what is left, before the lease ends."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await asyncio.wait([writing])
        if self._noted and not self._members.fault:
            try:
                async with asyncio.timeout(CLOSE_WAIT_S):
                    while self._noted:
                        await self._write(dict(islice(self._noted.items(), ITEMS_AT_A_TIME)))
            except (TimeoutError, *connection.FAILURES) as error:
                self._tell(error)

    # ── taking on ────────────────────────────────────────────────────────────────────────────

    async def claim(self, digits: str) -> bool:
        """Hold an item whose holder is dead, from its copy, by the digits of its name. False if
        there is none. Raises ``NotReady`` if its holder lives, a ``TidegateError`` if there is no
        room for it, and one of ``connection.FAILURES``."""
        claimed = await self._members.client.eval(
            scripts.CLAIM_ITEM, 1, self._names.item(digits), self._tag, self._names.alive("")
        )
        if not claimed:
            return False
        if len(claimed) == 1:
            raise NotReady("the orchestrator that has this has just come; ask again in a moment")
        *facts, copy = claimed
        kind, key, name = (fact.decode() for fact in facts)
        shelf = self._shelves.get(kind)
        if shelf is None or name in self._noted:  # it was here a moment ago
            return False
        try:
            shelf.adopt(key, name, copy)
        except msgspec.DecodeError:
            service_log.exception("an item of another orchestrator cannot be read")
            return False
        self.adopted += 1
        return True

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def _check_all(self) -> None:
        for kind, shelf in self._shelves.items():
            for key, name in list(shelf.names()):
                self._note(_Noted(kind, key, Change.CHECK), name)

    def _note(self, noted: _Noted, name: str) -> None:
        self._remember(noted, name)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all(), name="state items")

    def _remember(self, noted: _Noted, name: str) -> None:
        known = self._noted.get(name)
        if known is None or known.change < noted.change:
            self._noted[name] = noted
            if len(self._noted) > MAX_NOTED:
                del self._noted[next(iter(self._noted))]

    async def _write_all(self) -> None:
        await asyncio.sleep(FLUSH_S)
        while self._noted:
            some = dict(islice(self._noted.items(), ITEMS_AT_A_TIME))
            try:
                if not self._members.fault:
                    await self._write(some)
                    self._is_failing = False
                    continue
            except connection.FAILURES as error:
                self._tell(error)
            except Exception:  # a fault of ours; nothing is tried for ever
                service_log.exception("items cannot be copied to the store; they are dropped")
                for name in some:
                    self._noted.pop(name, None)
            await asyncio.sleep(RETRY_S)

    async def _write(self, noted: Mapping[str, _Noted]) -> None:
        copiers = {
            name: self._shelves[one.kind].copier(one.key, name)
            for name, one in noted.items()
            if one.change is Change.WHOLE
        }
        for name in noted:
            self._noted.pop(name, None)
        try:
            copies = await asyncio.to_thread(_copied, copiers)
            async with self._members.client.pipeline(transaction=False) as pipe:
                for name, one in noted.items():
                    self._add(pipe, name, one, copies.get(name))
                answers = await pipe.execute()
        except BaseException:
            for name, one in noted.items():
                self._remember(one, name)
            raise
        for (name, one), answer in zip(noted.items(), answers, strict=True):
            if answer == 1:
                self._noted.pop(name, None)
                self._shelves[one.kind].let_go(one.key, name)
            elif answer == 2:  # the store was emptied
                self._noted[name] = _Noted(one.kind, one.key, Change.WHOLE)

    def _add(self, pipe: Any, name: str, one: _Noted, copy: bytes | None) -> None:
        key = self._names.item(digits_of(name))
        keep_ms = max(1, round(1000 * self._shelves[one.kind].keep_s))
        if one.change is Change.CHECK:
            pipe.eval(scripts.USE_ITEM, 1, key, self._tag, 0)
        elif one.change is Change.USE:
            pipe.eval(scripts.USE_ITEM, 1, key, self._tag, keep_ms)
        elif copy is None:
            pipe.eval(scripts.DROP_ITEM, 1, key, self._tag)
        else:
            pipe.eval(scripts.KEEP_ITEM, 1, key, self._tag, keep_ms, one.kind, one.key, name, copy)

    def _tell(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            service_log.warning(
                "sessions and responses are not copied to the store: changes would be lost with"
                " this orchestrator; will retry",
                extra=fields(items=len(self._noted), error=connection.describe_error(error)),
            )


def _copied(copiers: Mapping[str, Copier | None]) -> dict[str, bytes]:
    """Copies by name, of those that are still kept."""
    copies = {}
    for name, copier in copiers.items():
        if copier is not None:
            try:
                copies[name] = copier()
            except Exception:  # a fault of ours, which others' items need not suffer from
                service_log.exception("an item cannot be copied")
    return copies
