"""The files of an engine: their digest, and whether they are still what was installed."""

import base64
import csv
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from catalog.engine_entry import EngineEntry

_SHA256: Final = "sha256="


def verify_engine(entry: EngineEntry) -> str:
    """The first problem of an engine; empty if there is none. Reads every file of it."""
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
    """Hex SHA-256 over this Python's version and the files' contents, in their order: with another
    Python a server runs another engine."""
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def digest_of_packages(packages: Path) -> str:
    """Digest over pip's own records, which have the digest of every file that it installed."""
    digest = hashlib.sha256()
    for record in sorted(packages.glob("*.dist-info/RECORD")):
        digest.update(record.parent.name.encode() + b"\0" + record.read_bytes())
    return digest.hexdigest()


def site_packages(folder: Path) -> Path:
    """The folder of an environment's packages."""
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _packages(packages: Path, entry: EngineEntry) -> str:
    """The first problem by pip's records. Scripts, which lie elsewhere, are not checked: their
    paths were changed."""
    if digest_of_packages(packages) != entry.digest:
        return "packages were installed, removed or replaced there"
    for record in sorted(packages.glob("*.dist-info/RECORD")):
        with record.open(newline="") as rows:
            for name, digest, *_ in csv.reader(rows):
                if not digest.startswith(_SHA256) or name.startswith("..") or _is_cache(name):
                    continue
                with (packages / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").digest()
                if _told(found) != digest.removeprefix(_SHA256):
                    return f"{name} has changed"
    return ""


def _is_cache(name: str) -> bool:
    """Whether ``name`` is byte code, which some wheels bring and Python compiles again."""
    return name.endswith(".pyc")


def _told(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
