"""Settings that are read again while the process serves: on SIGHUP, or ``POST /admin/reload``.

Parts that can change register for it (``follow``); other settings are reported as needing a
restart. Invalid settings change nothing. Streams and waiting requests go on as they were.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.errors import InvalidRequest
from orchestrator.settings import InvalidSettings, Settings, load_settings
from orchestrator.telemetry.log import fields, service_log

Follow = Callable[[Settings], None]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Names of the settings that have changed; never their values, some of which are secret."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]

    def described(self) -> dict[str, object]:
        """The fields as an answer's JSON object."""
        return {"changed": self.changed, "needs_restart": self.needs_restart}


class Reloader:
    """Reads the settings again, one reading at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        """The settings in force; those that need a restart keep their old values."""
        self.load: Callable[[], Settings] = load_settings
        """Reads all sources; replaced by a caller that has more of them, such as a command line."""
        self._followers: list[tuple[frozenset[str], Follow]] = []
        self._reading = asyncio.Lock()

    def follow(self, names: Iterable[str], apply: Follow) -> None:
        """Call ``apply`` with the new settings whenever one of ``names`` has changed. If it raises,
        those settings stay as they were."""
        found = frozenset(names)
        unknown = found - Settings.model_fields.keys()
        assert not unknown, f"no such settings: {unknown}"
        self._followers.append((found, apply))

    @property
    def reloadable(self) -> frozenset[str]:
        """Every setting that can change while the process runs."""
        return frozenset[str]().union(*(names for names, _ in self._followers))

    async def reload(self) -> Reloaded:
        """Read and apply the settings. Raises ``InvalidRequest``, and logs why, if they are
        invalid."""
        async with self._reading:
            try:
                new = await asyncio.to_thread(self.load)
            except InvalidSettings as error:
                service_log.error("settings not reloaded, the old ones stay: %s", error)
                raise InvalidRequest(
                    f"the settings do not fit, the old ones stay: {error}"
                ) from None
            return self._apply(new)

    def _apply(self, new: Settings) -> Reloaded:
        old = self.settings
        differing = {n for n in Settings.model_fields if getattr(new, n) != getattr(old, n)}
        changed: set[str] = set()
        failed: set[str] = set()
        for names, apply in self._followers:
            mine = names & differing
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
        self.settings = old.model_copy(update={name: getattr(new, name) for name in changed})
        done = Reloaded(tuple(sorted(changed)), tuple(sorted(differing - changed)))
        service_log.info(
            "settings reloaded",
            extra=fields(
                changed=",".join(done.changed) or None,
                needs_restart=",".join(done.needs_restart) or None,
            ),
        )
        return done
