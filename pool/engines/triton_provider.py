"""Triton as an engine of the catalog: from a path, the NGC image's folder, or the wheel.

``docker_command`` shows how Docker runs it from an image, which this does not do.
"""

import asyncio
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.engine_entry import EngineEntry, PreparedEngine
from catalog.engines import EngineCatalog
from catalog.errors import NoEngine
from catalog.paths import NGC_ROOT
from catalog.shared_file import now_ms
from pool.engines import triton_wheel as wheel
from pool.engines.environments import prepared
from pool.engines.triton import TritonInstall, find_triton
from pool.engines.triton_fetch import PIP, fetch_triton
from pool.preflight import gpu


@dataclass(frozen=True, slots=True)
class TritonProvider:
    """Provides Triton. ``configured``: a server to use rather than the first that is found."""

    configured: Path | None = None
    ngc_root: Path = NGC_ROOT
    pip: Sequence[str] = PIP

    async def ensure(self, home: Path) -> PreparedEngine:
        """The server that ``tidegate up`` would start; the wheel is fetched if there is none.

        Raises ``EngineNotFound``, ``MachineUnfit``, ``FetchFailed``, ``LogUnusable``,
        ``CatalogUnusable``.
        """
        try:
            install = find_triton(self.configured, home, self.ngc_root)
        except NoEngine:
            await fetch_triton(home, self.pip)
            install = find_triton(self.configured, home, self.ngc_root)
        return await asyncio.to_thread(registered, home, install)


def registered(home: Path, install: TritonInstall) -> PreparedEngine:
    """Put a server that is there into the catalog. Raises ``CatalogUnusable``."""
    digest = digest_of_install(install)
    is_wheel = install.source == "wheel"
    entry = EngineCatalog(home).put(
        EngineEntry(
            id=f"triton-{install.version}-{digest[:8]}",
            engine="triton",
            version=install.version,
            build_ref=f"wheel {wheel.WHEEL}" if is_wheel else f"path {install.binary.parents[1]}",
            created_ms=now_ms(),
            digest=digest,
            artifacts=(str(wheel.wheel_dir(home)),) if is_wheel else (),
            compute_mode="cuda" if gpu.look().devices else "cpu",
            binary=str(install.binary),
        )
    )
    return prepared(entry)


def install_of(entry: EngineEntry, home: Path) -> TritonInstall:
    """The server that an entry describes, as it is now. Raises ``EngineNotFound``,
    ``MachineUnfit``."""
    how, _, where = entry.build_ref.partition(" ")
    if how == "wheel":
        return find_triton(None, home, ngc_root=home / "none")
    return find_triton(Path(where), home)


def docker_command(image: str, model: Path, *, gpus: bool) -> list[str]:
    """The command that serves ``model`` by the Triton of an image with Tidegate's worker in it
    (``docker/`` builds one): gRPC on port 8001 of loopback."""
    return [
        *("docker", "run", "--rm", "--init", "--shm-size=256m"),
        *(("--gpus", "all") if gpus else ()),
        *("--publish", "127.0.0.1:8001:8001"),
        *("--volume", f"{model}:/model:ro"),
        *("--env", "TIDEGATE_WORKER__MODEL_PATH=/model"),
        *("--env", f"TIDEGATE_WORKER__DEVICE={'cuda' if gpus else 'cpu'}"),
        image,
    ]


def digest_of_install(install: TritonInstall) -> str:
    """Digest of server, Python backend and the Python that it runs: a difference in one of them
    makes another engine."""
    digest = hashlib.sha256(sys.version.encode())
    backend = install.backend_dir / "python"
    for file in (
        install.binary,
        *sorted(backend.glob("*.so")),
        backend / "triton_python_backend_stub",
    ):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
