"""Triton as an engine of the catalog: from a path, the NGC image's folder, or the wheel.

``docker_command`` shows how Docker runs it from an image, which this does not do.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.engine_entry import EngineEntry, PreparedEngine
from catalog.engine_files import digest_of_files
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
    files = files_of(install)
    digest = digest_of_files(files)
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
            files=tuple(map(str, files)),
        )
    )
    return prepared(entry)


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


def files_of(install: TritonInstall) -> list[Path]:
    """The files that decide what a server does: itself, its Python backend and that one's stub."""
    backend = install.backend_dir / "python"
    return [install.binary, *sorted(backend.glob("*.so")), backend / "triton_python_backend_stub"]
