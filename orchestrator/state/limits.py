"""Rate limits for all orchestrators that share a state together (OR-12, OR-18).

Each limited request asks the store once before it is queued, so limits are exact across all
orchestrators. While the store is unavailable or slow, each orchestrator applies the limits itself:
*n* orchestrators then allow at most *n* times as much. The first request detects this. Later
requests do not ask the store until it answers a lease renewal in time (``Members.prompt_renewal``).
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.admission.rate_limits import Limiter, SharedAccount
from orchestrator.errors import RateLimited
from orchestrator.state import connection, scripts
from orchestrator.state.connection import PATIENCE_S
from orchestrator.state.members import Members
from orchestrator.tasks.task import Task

FLUSH_S = 0.05
"""Seconds that the store may count an ended request as running."""


@dataclass(slots=True)
class _Asked:
    accounts: Sequence[SharedAccount]
    tokens: int
    """The most that it can use."""
    taken: int = 0
    """Tokens that the store has counted; 0 until it answers."""


class SharedLimits:
    """Applies the limits of all orchestrators and this one's own ``limiter`` to requests."""

    def __init__(self, members: Members, limiter: Limiter) -> None:
        self.alone = 0
        """Number of requests that only this orchestrator's own limits applied to, because the store
        did not answer in time."""
        self._members = members
        self._facts = members.names.prefix, members.tag
        self._limiter = limiter
        self._unused: Counter[tuple[str, str]] = Counter()
        """Tokens to give back, by key and account; 0 if only a request has ended."""
        self._flushing: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[Any]] = set()
        """Requests to the store. An abandoned one continues, so that its answer counts and its
        connection can be reused."""
        self._failed_in = -1
        """Number of the last lease renewal before the store failed a request."""

    async def take(self, task: Task) -> None:
        """Count a task in the store that is already counted here. Raises ``RateLimited``."""
        accounts = self._limiter.shared_accounts(task.job.key)
        if not accounts:
            return
        asked = _Asked(accounts, task.prompt_tokens + task.sampling.max_tokens)
        task.on_end.append(lambda ended: self._ended(ended, asked))
        answer = await self._ask(task, asked)
        if answer is None:
            self.alone += 1
        elif answer[:1] == ["refused"]:
            _, kind, name, wait_s = answer
            raise _refusal(kind, next(one for one in accounts if one.name == name), float(wait_s))
        else:
            for at in range(0, len(answer), 3):
                kind, name, whole_s = answer[at : at + 3]
                self._limiter.level(task.job.key, name, kind, float(whole_s))

    async def _ask(self, task: Task, asked: _Asked) -> list[str] | None:
        """The store's answer; None if it is late."""
        members = self._members
        if members.fault or not members.has_renewed or members.prompt_renewal <= self._failed_in:
            return None
        asking = asyncio.create_task(self._question(task, asked), name="limits asked")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait((asking,), timeout=PATIENCE_S)
        answer = asking.result() if asking.done() else None
        if answer is None and members.prompt_renewal > self._failed_in:
            self._failed_in = members.renewals
        return answer

    async def _question(self, task: Task, asked: _Asked) -> list[str] | None:
        stated = [value for one in asked.accounts for value in (one.name, *one.limits, one.running)]
        try:
            found = await self._members.client.eval(
                scripts.TAKE, 0, *self._facts, asked.tokens, *stated
            )
        except connection.FAILURES:
            return None
        answer = [str(each, "utf-8") for each in found]
        if answer[:1] != ["refused"]:
            asked.taken = asked.tokens
            if task.ending is not None:  # it ended during the request to the store
                self._ended(task, asked)
        return answer

    def _ended(self, task: Task, asked: _Asked) -> None:
        used = task.prompt_tokens + task.completion_tokens if task.marks.dispatched else 0
        for one in asked.accounts:
            self._unused[task.job.key, one.name] += max(0, asked.taken - used)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush(), name="limits")

    async def _flush(self) -> None:
        await asyncio.sleep(FLUSH_S)
        self._flushing = None
        unused, self._unused = self._unused, Counter()
        if self._members.fault:
            return  # rates recover within a minute; the next request reports running requests
        try:
            async with self._members.client.pipeline(transaction=False) as pipe:
                for (key, name), tokens in unused.items():
                    for one in self._limiter.shared_accounts(key):
                        if one.name == name:
                            stated = (name, one.limits[1], tokens, one.running)
                            pipe.eval(scripts.GIVE_BACK, 0, *self._facts, *stated)
                await pipe.execute()
        except connection.FAILURES:
            return


def _refusal(kind: str, account: SharedAccount, wait_s: float) -> RateLimited:
    requests, tokens, concurrent = account.limits
    limit = {
        "concurrent": f"{concurrent} requests in progress",
        "requests": f"{requests} requests a minute",
        "tokens": f"{tokens} tokens a minute",
    }[kind]
    reached = f"the limit of {limit} for {account.whose} on all orchestrators together is reached"
    if kind == "concurrent":  # the end of a request is unknown
        return RateLimited(reached)
    return RateLimited(reached, retry_after_ms=1000 * wait_s)
