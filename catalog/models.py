"""``ModelCatalog``: the models on this machine, for all processes.

    TIDEGATE_HOME/models/
      store/<id>/             complete models, each with its entry in ``.tidegate.json``
      staging/<id>/           models whose files are being downloaded, likewise
      trash/                  models being deleted

A model moves to ``store`` in one step, once all of its files and its entry are there.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path, PurePosixPath

import msgspec

from catalog.atomic import sync_folder, sync_tree
from catalog.errors import CatalogUnusable, NoSuchModel, StagingFailed
from catalog.manifests import (
    Index,
    now_ms,
    ordered,
    read_manifests,
    write_manifest,
    writing,
)
from protocol.model_digest import files_digest, model_digest


class ModelState(StrEnum):
    """State of a model: ``ACTIVE`` only if every file existed and was valid."""

    STAGING = "staging"
    """Files are being downloaded, or that was interrupted: add the model again to resume."""
    ACTIVE = "active"
    BROKEN = "broken"
    """``verify`` found a problem, which ``problem`` describes."""


class ModelFormat(StrEnum):
    SAFETENSORS = "safetensors"
    """A folder in Hugging Face layout."""
    GGUF = "gguf"


class ModelFile(msgspec.Struct, frozen=True):
    """One file; ``path`` is below the model's folder."""

    path: str
    bytes: int
    sha256: str


class ModelEntry(msgspec.Struct, frozen=True):
    """One model. Times are Unix milliseconds."""

    id: str
    name: str
    state: ModelState
    format: ModelFormat
    source: str
    """``hub:org/name``, ``pypi:package``, or the path of its source."""
    created_ms: int
    revision: str = ""
    """The commit, for a model from a hub."""
    license: str = ""
    """The license as its author names it; empty if no file names one."""
    files: tuple[ModelFile, ...] = ()
    digest: str = ""
    """The model's digest, as in the model card of an engine that serves it."""
    used_ms: int = 0
    verified_ms: int = 0
    problem: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def gguf(self) -> PurePosixPath | None:
        """The GGUF file that the model is or was converted from: the first if there are several."""
        first = min((f.path for f in self.files if f.path.endswith(".gguf")), default=None)
        return None if first is None else PurePosixPath(first)


MANIFEST = ".tidegate.json"


class ModelCatalog:
    """The models below the state directory ``home``. Several processes may have one each.

    Methods raise ``CatalogUnusable`` if the file system refuses.
    """

    def __init__(self, home: Path) -> None:
        self.folder = home / "models"

    def models(self) -> Index[ModelEntry]:
        """All entries, oldest first, and the time of the last change."""
        # In this order, a model that moves meanwhile is found. Complete ones override others.
        staged, stored = (
            read_manifests(self.folder / kind, MANIFEST, ModelEntry)
            for kind in ("staging", "store")
        )
        found = {
            entry.id: msgspec.structs.replace(entry, state=ModelState.STAGING)
            for entry in staged.entries
        } | {entry.id: entry for entry in stored.entries}
        changed_ms = max(staged.changed_ms, stored.changed_ms)
        return Index(ordered(found.values()), changed_ms)

    def entries(self) -> tuple[ModelEntry, ...]:
        return self.models().entries

    def get(self, text: str) -> ModelEntry:
        """The entry with that id or name. Raises ``NoSuchModel``."""
        found = self.find(text)
        if found is None:
            raise NoSuchModel(f"there is no model {text!r} on this machine; {self.what_there_is()}")
        return found

    def find(self, text: str) -> ModelEntry | None:
        """The entry with that id or name, preferring a usable one; None if there is none."""
        its = [entry for entry in self.entries() if text in (entry.id, entry.name)]
        usable = [entry for entry in its if entry.state is ModelState.ACTIVE]
        return next(iter(usable or its), None)

    def what_there_is(self) -> str:
        """The names of active models and how to add one, for error messages."""
        names = sorted(entry.name for entry in self.entries() if entry.state is ModelState.ACTIVE)
        if not names:
            return "none has been added: tidegate models add HF_ID, PATH or FILE.gguf"
        return f"available: {', '.join(names)}; add one with tidegate models add"

    def path_of(self, entry: ModelEntry) -> Path:
        """The folder with the model's files, which changes once it is complete."""
        kind = "staging" if entry.state is ModelState.STAGING else "store"
        return self.folder / kind / entry.id

    def servable_path(self, entry: ModelEntry) -> Path:
        """The path to give to an engine: the folder, or an unconverted GGUF file."""
        gguf = entry.gguf if entry.format is ModelFormat.GGUF else None
        return self.path_of(entry) if gguf is None else self.path_of(entry) / gguf

    @contextlib.contextmanager
    def claim(self, id: str) -> Iterator[None]:
        """Hold the right to stage, verify or remove that model; ends with the process.

        Raises ``StagingFailed`` if another process holds it.
        """
        folder = self.folder / "locks"
        try:
            self._make(folder)
            lock = os.open(folder / id, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CatalogUnusable(
                f"cannot write to {folder}: {error.strerror}; choose another with TIDEGATE_HOME"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise StagingFailed(f"another process is at work on {id}: wait until it ends") from None
        try:
            yield
        finally:
            os.close(lock)

    def digest_of(self, entry: ModelEntry, threads: int | None = None) -> str:
        """The model's digest, as in an engine's model card. Reads the weights on ``threads``
        threads (None: one per core). Raises ``OSError``."""
        folder = self.path_of(entry)
        if entry.format is not ModelFormat.GGUF:
            return model_digest(folder, threads)
        parts = sorted(file.path for file in entry.files if file.path.endswith(".gguf"))
        return files_digest([folder / part for part in parts], threads)

    def stage(self, entry: ModelEntry) -> Path:
        """Record that a model's files are being downloaded. Returns their target folder.

        The files of a broken model go back there to be completed. Raises ``StagingFailed`` if
        another model has its name.
        """
        with writing(self.folder):
            require_free(entry, self.entries())
            folder, broken = (self.folder / kind / entry.id for kind in ("staging", "store"))
            if broken.exists():
                self._throw_away(folder)
                self._make(folder.parent)
                os.rename(broken, folder)
            self._make(folder)
            write_manifest(folder / MANIFEST, entry)
        return folder

    def activate(self, entry: ModelEntry) -> ModelEntry:
        """Register a model whose staged files are complete and verified. Returns its new entry."""
        active = msgspec.structs.replace(entry, state=ModelState.ACTIVE, problem="")
        staged, final = self.folder / "staging" / entry.id, self.folder / "store" / entry.id
        # Also syncs links and directory entries, before other processes have to wait.
        sync_tree(staged)
        with writing(self.folder):
            self._make(final.parent)
            write_manifest(staged / MANIFEST, active)
            self._throw_away(final)
            os.rename(staged, final)
            sync_folder(final.parent)
        return active

    def update(self, id: str, **changes: str | int) -> None:
        """Change these fields of a model: use, verification or name. Other processes' changes since
        it was read stay; a removed model stays removed."""
        with writing(self.folder):
            for entry in self.entries():
                if entry.id == id:
                    changed = msgspec.structs.replace(entry, **changes)
                    write_manifest(self.path_of(entry) / MANIFEST, changed)

    def remove(self, entry: ModelEntry) -> None:
        """Delete a model, complete or not. Raises ``StagingFailed`` if another process is working
        on it."""
        with self.claim(entry.id), writing(self.folder):
            for kind in ("store", "staging"):
                self._throw_away(self.folder / kind / entry.id)
        self.empty_trash()

    def empty_trash(self) -> None:
        """Delete the trash of this process or of a killed one."""
        with contextlib.suppress(FileNotFoundError):
            for each in (self.folder / "trash").iterdir():
                shutil.rmtree(each, ignore_errors=True)

    def touch(self, entry: ModelEntry) -> None:
        """Note that a model is used; least recently used models make room for others."""
        self.update(entry.id, used_ms=now_ms())

    def _make(self, folder: Path) -> None:
        """Make ``folder`` and its parent folders, accessible only to their owner."""
        for each in (self.folder, folder.parent, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _throw_away(self, folder: Path) -> None:
        if not folder.exists():
            return
        trash = self.folder / "trash"
        self._make(trash)
        os.rename(folder, trash / f"{folder.name}-{secrets.token_hex(4)}")


def require_free(entry: ModelEntry, entries: Iterable[ModelEntry]) -> None:
    """Raise ``StagingFailed`` if one of the other entries has the name of ``entry``."""
    for each in entries:
        if each.id != entry.id and entry.name in (each.name, each.id):
            raise StagingFailed(
                f"the name {entry.name} is taken by {each.id} from {each.source}: give another one"
                f" with --name, or remove that one (tidegate models remove {each.id})"
            )
