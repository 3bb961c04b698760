"""``EngineCatalog``: the engines on this machine.

TIDEGATE_HOME/engines/
  <id>/                            an engine's entry in ``.tidegate-engine.json``, and its
                                   environment, unless it is elsewhere (a Triton in ``/opt``)
  <id>.partial/, <id>.lock         an environment being created
"""

import base64
import csv
import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from catalog.errors import EngineUnknown
from catalog.manifests import Index, read_manifests, write_manifest, writing

ComputeMode = Literal["cpu", "cuda"]
EnvironmentVars = Mapping[str, str]
"""Environment variables for a process, which override its own."""


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine's catalog entry. ``created_ms`` is Unix time."""

    id: str
    engine: str
    """``triton``, ``vllm``, ``llamacpp``."""
    version: str
    build_ref: str
    """The source of the engine: ``wheel nvidia-pytriton==0.7.0``, ``path /opt/tritonserver``."""
    created_ms: int
    digest: str = ""
    """Hex SHA-256 over the installed files."""
    build_flags: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    """Paths that belong to this engine alone."""
    compute_mode: ComputeMode = "cpu"
    binary: str = ""
    files: tuple[str, ...] = ()
    """Files that ``digest`` covers, in order; empty for an environment of packages."""


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine that can be started."""

    name: str
    version: str
    build_ref: str
    digest: str
    flags: tuple[str, ...]
    compute_mode: ComputeMode
    binary: Path
    """The server's executable, or the Python of its environment."""
    catalog_id: str
    environment: EnvironmentVars = field(default_factory=dict)
    """Environment variables for the process that runs it."""


MANIFEST = ".tidegate-engine.json"


class EngineCatalog:
    """The engines of the state directory ``home``. Methods raise ``CatalogUnusable``."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "engines"

    def engines(self) -> Index[EngineEntry]:
        """All engines that still exist, oldest first."""
        found = read_manifests(self.folder, MANIFEST, EngineEntry)
        here = tuple(entry for entry in found.entries if Path(entry.binary).exists())
        return msgspec.structs.replace(found, entries=here)

    def entries(self) -> tuple[EngineEntry, ...]:
        return self.engines().entries

    def get(self, text: str) -> EngineEntry:
        """The entry with that id, or the newest engine of that name. Raises ``EngineUnknown``."""
        entries = self.entries()
        its = [entry for entry in entries if text in (entry.id, entry.engine)]
        if not its:
            there = ", ".join(entry.id for entry in entries) or "none"
            raise EngineUnknown(
                f"there is no engine {text!r} here (available: {there}); tidegate engines ensure"
                " ENGINE installs one"
            )
        return its[-1]

    def put(self, entry: EngineEntry) -> EngineEntry:
        """Add or update an engine's entry; its creation time stays."""
        with writing(self.folder):
            known = {each.id: each for each in self.entries()}.get(entry.id, entry)
            entry = msgspec.structs.replace(entry, created_ms=known.created_ms)
            path = self.folder / entry.id / MANIFEST
            path.parent.mkdir(exist_ok=True)
            if entry != known or not path.exists():
                write_manifest(path, entry)
            return entry


_SHA256: Final = "sha256="


def verify_engine(entry: EngineEntry) -> str:
    """The first problem of an engine; empty if there is none. Reads all of its files."""
    try:
        if entry.engine != "triton":
            return _packages(site_packages(Path(entry.binary).parents[1]), entry)
        if not entry.files:
            return "its files are not on record: run tidegate engines ensure triton"
        same = digest_of_files(map(Path, entry.files)) == entry.digest
        return "" if same else "its server, its Python backend or its stub has changed"
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read: {error.strerror}"


def digest_of_files(files: Iterable[Path]) -> str:
    """Hex SHA-256 over this Python's version and the files' contents, in order: with another
    Python, a server runs another engine."""
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def digest_of_packages(packages: Path) -> str:
    """Digest over pip's own records, which have the digest of every installed file."""
    digest = hashlib.sha256()
    for record in sorted(packages.glob("*.dist-info/RECORD")):
        digest.update(record.parent.name.encode() + b"\0" + record.read_bytes())
    return digest.hexdigest()


def site_packages(folder: Path) -> Path:
    """The folder of an environment's packages."""
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _packages(packages: Path, entry: EngineEntry) -> str:
    """The first problem according to pip's records. Not checked are scripts, whose paths change,
    and bytecode, which some wheels contain and Python recompiles."""
    if digest_of_packages(packages) != entry.digest:
        return "packages were installed, removed or replaced there"
    for record in sorted(packages.glob("*.dist-info/RECORD")):
        with record.open(newline="") as rows:
            for name, digest, *_ in csv.reader(rows):
                if not digest.startswith(_SHA256) or name.startswith("..") or name.endswith(".pyc"):
                    continue
                with (packages / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").digest()
                told = base64.urlsafe_b64encode(found).decode().rstrip("=")
                if told != digest.removeprefix(_SHA256):
                    return f"{name} has changed"
    return ""
