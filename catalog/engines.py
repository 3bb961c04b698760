"""``EngineCatalog``: the engines on this machine.

    TIDEGATE_HOME/engines/
      catalog.json                     what this file is about
      <id>/                            an engine's own environment, with ``.tidegate-engine.json``
      <id>.partial/, <id>.lock         one that is being made

As with models the folders are the truth. An engine elsewhere (a Triton in ``/opt``) has its entry
in the file only, and gets it again when it is asked for again.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from catalog.engine_entry import EngineEntry
from catalog.errors import EngineUnknown
from catalog.shared_file import SharedFile, now_ms

MANIFEST = ".tidegate-engine.json"


class Engines(msgspec.Struct, frozen=True):
    """The catalog's file. ``version`` counts its changes."""

    version: int = 0
    changed_ms: int = 0
    entries: tuple[EngineEntry, ...] = ()


class EngineCatalog:
    """The engines of the state directory ``home``. Methods raise ``CatalogUnusable``."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "engines"
        self._file = SharedFile(self.folder / "catalog.json", Engines, self._from_folders)

    @property
    def file(self) -> Path:
        return self._file.path

    def engines(self) -> Engines:
        """All engines that are still there, oldest first, with the number of their last change."""
        found = self._file.read()
        here = tuple(entry for entry in found.entries if Path(entry.binary).exists())
        return msgspec.structs.replace(found, entries=here)

    def entries(self) -> tuple[EngineEntry, ...]:
        return self.engines().entries

    def get(self, text: str) -> EngineEntry:
        """The entry with that id, or the newest engine of that name. Raises ``EngineUnknown``."""
        its = [entry for entry in self.entries() if text in (entry.id, entry.engine)]
        if not its:
            there = ", ".join(entry.id for entry in self.entries()) or "none"
            raise EngineUnknown(
                f"there is no engine {text!r} on this machine (available: {there});"
                f" tidegate engines ensure {text} gets one"
            )
        return its[-1]

    def put(self, entry: EngineEntry) -> EngineEntry:
        """Add or update an engine's entry; its time of creation stays."""
        with self._file.editing() as (engines, write):
            known = {each.id: each for each in engines.entries}
            old = known.get(entry.id)
            if old is not None:
                entry = msgspec.structs.replace(entry, created_ms=old.created_ms)
            if entry != old:
                known[entry.id] = entry
                write(self._numbered(known.values(), engines.version))
        return entry

    def _from_folders(self) -> Engines:
        entries = []
        for manifest in self.folder.glob(f"*/{MANIFEST}"):
            try:
                entry = msgspec.json.decode(manifest.read_bytes(), type=EngineEntry)
            except (OSError, msgspec.MsgspecError):
                continue
            if entry.id == manifest.parent.name:
                entries.append(entry)
        return self._numbered(entries, 0)

    def _numbered(self, entries: Iterable[EngineEntry], version: int) -> Engines:
        ordered = sorted(entries, key=lambda entry: (entry.created_ms, entry.id))
        return Engines(version + 1, now_ms(), tuple(ordered))
