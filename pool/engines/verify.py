"""Checks whether an engine is still what was installed."""

import base64
import csv
import hashlib
from pathlib import Path
from typing import Final

from catalog.engine_entry import EngineEntry
from catalog.errors import ProvisionError
from pool.engines.environments import digest_of_packages, site_packages
from pool.engines.triton_provider import digest_of_install, install_of

_SHA256: Final = "sha256="


def verify_engine(entry: EngineEntry, home: Path) -> str:
    """The first problem of an engine; empty if there is none. Reads every file of it."""
    try:
        if entry.engine == "triton":
            same = digest_of_install(install_of(entry, home)) == entry.digest
            return "" if same else "its server, its Python backend or its stub has changed"
        return _packages(site_packages(Path(entry.binary).parents[1]), entry)
    except ProvisionError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read: {error.strerror}"


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
    """Whether ``name`` is byte code, which some wheels bring and Python writes anew."""
    return name.endswith(".pyc")


def _told(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
