"""Budgets in addition to time: tokens and money per run, key and month (DL-25)."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from aiohttp import web

from orchestrator.admission.rate_limits import Standing
from orchestrator.api.auth import Key
from orchestrator.budgets import api
from orchestrator.budgets.books import Books
from orchestrator.budgets.budgets import Budgets
from orchestrator.budgets.section import BudgetSection
from orchestrator.errors import NotReady
from orchestrator.extension import Core, Extension, Host
from orchestrator.tasks.job import ROOM_FIELDS
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import service_log

FLUSH_S = 1.0
"""Seconds between two writes of the books."""


class BudgetRoom(Extension):
    keeps = ROOM_FIELDS

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        settings = core.settings
        section, journal = settings.section(BudgetSection), settings.journal.path
        stated = ((name, bytes.fromhex(key.digest_hex)) for name, key in settings.keys.items())
        names = {Key(name, digest).fingerprint: name for name, digest in stated}
        books = Books(journal and journal.with_suffix(".books"), core.clock.unix(), core.sharing)
        core.sharing.on_lapsed(books.tell_all)
        self.budgets = Budgets(section, names, books, core.clock)
        core.sharing.add_up(self.budgets)
        self._next_at = 0.0
        self._writing: asyncio.Task[None] | None = None

    def bind(self, host: Host) -> None:
        if not self.core.is_simulated:
            host.on_offered.append(self.budgets.follow)

    def start(self) -> None:
        self._writing = asyncio.create_task(self._open(), name="books")

    async def _open(self) -> None:
        try:
            await self.budgets.books.open()
        except Exception:
            service_log.exception("cannot open the books: keys with a budget are refused")
        finally:
            self._writing = None

    def charge(self, task: Task) -> None:
        self.budgets.charge(task)

    def standings(self, key: str) -> Iterable[Standing]:
        return self.budgets.standings(key)

    def upkeep(self) -> None:
        now = self.core.clock.now()
        books = self.budgets.books
        is_due = now >= self._next_at and (books.has_new or books.has_untold)
        if is_due and books.is_open and self._writing is None:
            self._next_at = now + FLUSH_S
            self._writing = asyncio.create_task(self._write(), name="books")

    async def _write(self) -> None:
        try:
            if self.budgets.books.has_new:
                await self.budgets.books.flush()
            with suppress(NotReady):  # the store is unavailable
                await self.budgets.books.tell()
        except Exception:
            service_log.exception("cannot write the books; will retry")
        finally:
            self._writing = None

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        await self.budgets.books.close()

    def attach(self, app: web.Application) -> None:
        app[api.BUDGETS] = self.budgets
        app.add_routes(api.routes())
