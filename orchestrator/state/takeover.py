"""Takes over durable tasks from orchestrators that died or left with unfinished tasks. Each
survivor takes a few at a time, so that all get a share. A member counts as dead if two renewals do
not find its lease. After an outage of the store, members have the duration of a lease to renew."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from orchestrator.state import connection, scripts
from orchestrator.state.members import Members
from orchestrator.state.tasks import SharedTasks
from orchestrator.tasks.journal.records import UnfinishedTask
from orchestrator.telemetry.log import fields, service_log

TASKS_AT_A_TIME = 16
PAUSE_S = 0.02
"""Pause in seconds after each piece, for the other survivors and for the event loop."""


class Takeover:
    """Looks for dead members after each lease renewal."""

    def __init__(
        self,
        members: Members,
        tasks: SharedTasks,
        take_on: Callable[[Sequence[UnfinishedTask]], None],
        may_take: Callable[[], bool],
    ) -> None:
        """``take_on`` gets the tasks that this orchestrator now owns. ``may_take``: whether it can
        process them."""
        self.taken = 0
        self._members = members
        self._tasks = tasks
        self._take_on = take_on
        self._may_take = may_take
        self._were_dead: set[str] = set()
        self._may_have_missed = False
        """Whether this orchestrator may own tasks in the store that it does not know, because an
        answer was lost."""
        self._working: asyncio.Task[None] | None = None
        members.on_seen.append(self._look)

    def close(self) -> None:
        with suppress(ValueError):
            self._members.on_seen.remove(self._look)
        if self._working is not None:
            self._working.cancel()

    def _look(self) -> None:
        dead = {tag for tag, seen in self._members.others.items() if not seen.is_alive}
        due, self._were_dead = dead & self._were_dead, dead
        due = {tag for tag in due if not self._members.is_of_others(tag)}
        is_alone = self._members.alive == 1
        if self._members.was_away_lately or not (self._may_take() or is_alone):
            return
        if (due or self._may_have_missed) and (self._working is None or self._working.done()):
            self._working = asyncio.create_task(self._take_all(due), name="takeover")

    async def _take_all(self, tags: set[str]) -> None:
        try:
            if self._may_have_missed:
                await self._take_missed()
            for tag in tags:
                while ids := await self._claim(tag):
                    await self._take(ids, tag)
                    await asyncio.sleep(PAUSE_S)
        except connection.FAILURES as error:
            self._may_have_missed = True
            service_log.warning(
                "cannot take over tasks of another orchestrator; will retry",
                extra=fields(error=connection.describe_error(error)),
            )

    async def _take_missed(self) -> None:
        """Take over tasks that belong to this orchestrator in the store but are unknown here."""
        mine = self._tasks.tag
        held: set[Any] = await self._members.client.smembers(self._tasks.names.held(mine))
        missed = {each.decode() for each in held} - self._tasks.known_ids()
        if missed:
            await self._take(sorted(missed), mine)
        self._may_have_missed = False

    async def _claim(self, tag: str) -> list[str]:
        names, mine = self._tasks.names, self._tasks.tag
        keys = (names.alive(tag), names.held(tag), names.held(mine), names.members)
        claimed = await self._members.client.eval(
            scripts.CLAIM, 4, *keys, tag, mine, TASKS_AT_A_TIME, names.task("")
        )
        return [each.decode() for each in claimed]

    async def _take(self, ids: Sequence[str], tag: str) -> None:
        names = self._tasks.names
        async with self._members.client.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hgetall(names.task(task_id))
                pipe.lrange(names.tokens(task_id), 0, -1)
            answers = await pipe.execute(raise_on_error=False)
        found = []
        for at, task_id in enumerate(ids):
            own = answers[2 * at : 2 * at + 2]
            try:
                if odd := [each for each in own if isinstance(each, Exception)]:
                    raise msgspec.DecodeError(f"its record has another type: {odd[0]}")
                found.append(self._tasks.claimed(task_id, *own))
            except msgspec.DecodeError:
                service_log.exception(
                    "cannot read a task of another orchestrator", extra=fields(task_id=task_id)
                )
        self.taken += len(found)
        service_log.info(
            "took over durable tasks of another orchestrator",
            extra=fields(tasks=len(found), of=tag),
        )
        self._take_on(found)
