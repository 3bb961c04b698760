"""Copies of sessions and responses in the store, so that they survive their orchestrator.

Each item has one holder, which serves it from memory. Soon after each change, the holder copies the
item to the store. No request waits for this::

    changed ─▶ 50 ms ─▶ a copy, unless another holds it ─▶ ``let_go`` here
    requested where it is unknown   ─▶ its holder lives ─▶ the request is forwarded there
                                    ─▶ its holder is dead ─▶ claimed, and adopted from the copy

After its lease expires, an orchestrator checks which items others have claimed. Until then, for one
renewal, it answers with its old state.
"""

import asyncio
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from orchestrator.errors import NotReady
from orchestrator.ids import digits_of
from orchestrator.sharing import Copier, Shelf
from orchestrator.state import connection, scripts
from orchestrator.state.members import Members
from orchestrator.telemetry.log import fields, service_log

FLUSH_S = 0.05
"""Seconds that a change waits for more changes before it is written."""
RETRY_S = 1.0
ITEMS_AT_A_TIME = 32
MAX_NOTED = 65_536
"""Most items that wait while the store is unavailable. The store drops older items itself at the
end of their retention."""
CLOSE_WAIT_S = 2.0


class _Noted(NamedTuple):
    kind: str
    key: str
    is_whole: bool
    """Whether the item changed or was removed. Otherwise its copy is only kept longer, if the item
    is still held here."""


class SharedItems:
    """Copies the items of this orchestrator, and adopts items of dead orchestrators."""

    def __init__(self, members: Members) -> None:
        self.adopted = 0
        self._members = members
        self._names = members.names
        self._tag = members.tag
        self._shelves: dict[str, Shelf] = {}
        self._noted: dict[str, _Noted] = {}
        """Pending writes, by name."""
        self._writing: asyncio.Task[None] | None = None
        self._is_failing = False
        members.on_lapsed.append(self._check_all)

    @property
    def waiting(self) -> int:
        return len(self._noted)

    def add(self, kind: str, shelf: Shelf) -> None:
        """Copy the items of a shelf. ``kind`` is their name in the store."""
        self._shelves[kind] = shelf
        shelf.on_change = lambda key, name: self._note(name, _Noted(kind, key, True))
        shelf.on_use = lambda key, name: self._note(name, _Noted(kind, key, False))

    async def close(self) -> None:
        """Write the remaining changes before the lease ends."""
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

    # ── adoption ─────────────────────────────────────────────────────────────────────────────

    async def claim(self, digits: str) -> bool:
        """Adopt a dead holder's item from its copy, by the digits of its name. Returns False if
        there is none. Raises ``NotReady`` if the holder lives, a ``TidegateError`` if there is no
        room for the item, and the errors of ``connection.FAILURES``."""
        claimed = await self._members.client.eval(
            scripts.CLAIM_ITEM, 1, self._names.item(digits), self._tag, self._names.alive("")
        )
        if not claimed:
            return False
        if len(claimed) == 1:
            raise NotReady("the orchestrator that has this has just started; retry in a moment")
        *facts, copy = claimed
        kind, key, name = (fact.decode() for fact in facts)
        shelf = self._shelves.get(kind)
        if shelf is None or name in self._noted:  # it was held here a moment ago
            return False
        try:
            shelf.adopt(key, name, copy)
        except msgspec.DecodeError:
            service_log.exception("cannot read an item of another orchestrator")
            return False
        self.adopted += 1
        return True

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def _check_all(self) -> None:
        for kind, shelf in self._shelves.items():
            for key, name in list(shelf.names()):
                self._note(name, _Noted(kind, key, False))

    def _note(self, name: str, noted: _Noted) -> None:
        self._remember(name, noted)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all(), name="state items")

    def _remember(self, name: str, noted: _Noted) -> None:
        known = self._noted.get(name)
        if known is None or (noted.is_whole and not known.is_whole):
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
            except Exception:  # our own bug: do not retry forever
                service_log.exception("cannot copy items to the store; they are dropped")
                for name in some:
                    self._noted.pop(name, None)
            await asyncio.sleep(RETRY_S)

    async def _write(self, noted: Mapping[str, _Noted]) -> None:
        copiers = {
            name: self._shelves[one.kind].copier(one.key, name)
            for name, one in noted.items()
            if one.is_whole
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
                self._remember(name, one)
            raise
        for (name, one), answer in zip(noted.items(), answers, strict=True):
            if answer == 1:
                self._noted.pop(name, None)
                self._shelves[one.kind].let_go(one.key, name)
            elif answer == 2:  # the store was emptied
                self._noted[name] = one._replace(is_whole=True)

    def _add(self, pipe: Any, name: str, one: _Noted, copy: bytes | None) -> None:
        key = self._names.item(digits_of(name))
        keep_ms = max(1, round(1000 * self._shelves[one.kind].keep_s))
        if not one.is_whole:
            pipe.eval(scripts.USE_ITEM, 1, key, self._tag, keep_ms)
        elif copy is None:
            pipe.eval(scripts.DROP_ITEM, 1, key, self._tag)
        else:
            pipe.eval(scripts.KEEP_ITEM, 1, key, self._tag, keep_ms, one.kind, one.key, name, copy)

    def _tell(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            service_log.warning(
                "cannot copy sessions and responses to the store: if this orchestrator dies, their"
                " changes are lost; will retry",
                extra=fields(items=len(self._noted), error=connection.describe_error(error)),
            )


def _copied(copiers: Mapping[str, Copier | None]) -> dict[str, bytes]:
    copies = {}
    for name, copier in copiers.items():
        if copier is not None:
            try:
                copies[name] = copier()
            except Exception:  # our own bug: it must not affect other items
                service_log.exception("cannot copy an item")
    return copies
