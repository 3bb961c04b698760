"""Runs with calls at several orchestrators. Each shares its runs with the renewals of its lease; no
request waits for that. A call is known everywhere after two renewals, half a second, as a rule
before its client can make the next one. One that comes sooner has the deadline that it states
itself.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from orchestrator.state import scripts
from orchestrator.state.connection import Names
from orchestrator.state.members import Members
from orchestrator.tasks.runs import RunNews, Runs
from orchestrator.telemetry.log import service_log

KEEP_S = 3600.0
"""Seconds that the store keeps a run; no deadline is later by default."""
MAX_KEPT, MAX_AT_A_TIME = 4096, 256


class _RunUpdate(msgspec.Struct, frozen=True, array_like=True):
    news: RunNews
    ends: float
    """When the run is due, in seconds of the store's clock; 0 for a call that has ended."""


class SharedRuns:
    """Exchanges runs with the others, as a part of each renewal."""

    def __init__(self, members: Members, names: Names, tag: str, runs: Runs) -> None:
        self._members = members
        self._name = names.runs
        self._tag = tag
        self._runs = runs
        self._untold: list[bytes] = []
        self._asked = 0
        """How many of these the running renewal has."""
        self._last = b"0"
        """Id of the last entry that was heard."""
        runs.on_news = self._note
        members.parts.append(self)

    def _note(self, news: RunNews) -> None:
        ends = 0.0 if news.calls is None else self._members.store_time() + news.left_s
        self._untold.append(msgspec.msgpack.encode(_RunUpdate(news, ends)))
        if len(self._untold) > MAX_KEPT:  # the store is away
            del self._untold[0]

    def ask(self, pipe: Any) -> int:
        told = self._untold[:MAX_AT_A_TIME]
        self._asked = len(told)
        keep_ms = round(1000 * KEEP_S)
        pipe.eval(scripts.RUNS, 1, self._name, self._tag, self._last, MAX_KEPT, keep_ms, *told)
        return 1

    def receive(self, answers: Sequence[Any]) -> None:
        (entries,) = answers
        if isinstance(entries, Exception):  # the others go without, as long as it is refused
            return
        del self._untold[: self._asked]
        for entry_id, (_, tag, _, body) in entries:
            self._last = entry_id
            if tag.decode() == self._tag:
                continue
            try:
                heard = msgspec.msgpack.decode(body, type=_RunUpdate)
            except msgspec.DecodeError:
                service_log.exception("another orchestrator's run cannot be read")
                continue
            left_s = heard.ends - self._members.store_time() if heard.ends else 0.0
            self._runs.hear(msgspec.structs.replace(heard.news, left_s=left_s))
