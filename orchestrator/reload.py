"""Reloads settings while the process serves: on SIGHUP or ``POST /admin/reload``.

Parts that can change register themselves (``follow``); other settings are reported as needing a
restart. Invalid settings change nothing. Streams and waiting requests are not affected.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from orchestrator.errors import InvalidRequest
from orchestrator.settings import InvalidSettings, Settings, load_settings
from orchestrator.telemetry.log import fields, service_log
from worker.environment import names_of, values_of

Follow = Callable[[Settings], None]
S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Names of the changed settings; never their values, some of which are secret."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]

    def described(self) -> dict[str, object]:
        """The fields as an answer's JSON object."""
        return {"changed": self.changed, "needs_restart": self.needs_restart}


class Reloader:
    """Reloads the settings, one reload at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        """The active settings; those that need a restart keep their old values."""
        self.load: Callable[[], Settings] = load_settings
        """Reads all sources; a caller with more sources, such as a command line, replaces it."""
        self._followers: list[tuple[frozenset[str], Follow]] = []
        self._reading = asyncio.Lock()

    def follow(self, names: Iterable[str], apply: Follow) -> None:
        """Call ``apply`` with the new settings whenever one of ``names`` (settings or whole
        sections) has changed. If it raises, those settings keep their old values."""
        found = frozenset(names)
        unknown = found.difference(names_of(Settings))
        assert not unknown, f"no such settings: {unknown}"
        self._followers.append((found, apply))

    async def reload(self) -> Reloaded:
        """Read and apply the settings. Logs and raises ``InvalidRequest`` if they are invalid."""
        async with self._reading:
            try:
                new = await asyncio.to_thread(self.load)
            except InvalidSettings as error:
                service_log.error("settings not reloaded; the old ones stay: %s", error)
                raise InvalidRequest(f"invalid settings; the old ones stay: {error}") from None
            return self._apply(new)

    def _apply(self, new: Settings) -> Reloaded:
        old = self.settings
        before, after = values_of(old), values_of(new)
        differing = {name for name, value in before.items() if value != after[name]}
        changed: set[str] = set()
        failed: set[str] = set()
        for names, apply in self._followers:
            mine = {n for n in differing if n in names or names.intersection(_sections_of(n))}
            if not mine:
                continue
            try:
                apply(new)
            except Exception:
                names_of = ",".join(sorted(mine))
                service_log.exception("a setting cannot change", extra=fields(settings=names_of))
                failed |= mine
            else:
                changed |= mine
        changed -= failed
        self.settings = _with(old, new, changed)
        done = Reloaded(tuple(sorted(changed)), tuple(sorted(differing - changed)))
        service_log.info(
            "settings reloaded",
            extra=fields(
                changed=",".join(done.changed) or None,
                needs_restart=",".join(done.needs_restart) or None,
            ),
        )
        return done


def _sections_of(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _with(old: S, new: S, names: Collection[str]) -> S:
    """The old settings, with the new values for ``names``."""
    update: dict[str, object] = {}
    for field in type(old).model_fields:
        inside = {name.removeprefix(f"{field}.") for name in names if name.startswith(f"{field}.")}
        if field in names:
            update[field] = getattr(new, field)
        elif inside:
            before, after = getattr(old, field), getattr(new, field)
            is_there = before is not None and after is not None
            update[field] = _with(before, after, inside) if is_there else after
    return old.model_copy(update=update)
