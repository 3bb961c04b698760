"""Makes engines available: Triton from a path, the NGC image's folder or the downloaded wheel;
other engines in their own environments."""

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from catalog.engines import ComputeMode, EngineCatalog, EngineEntry, PreparedEngine, digest_of_files
from catalog.errors import FetchFailed, NoEngine
from catalog.manifests import now_ms
from catalog.paths import NGC_ROOT
from pool.engines import triton_wheel as wheel
from pool.engines.environments import ensure_environment, prepared
from pool.engines.recipes import recipe_of
from pool.engines.triton import TritonInstall, find_triton
from pool.preflight import gpu
from pool.preflight.host import check_platform
from pool.process.logs import fresh_log, tail
from pool.process.process import command_environment, succeeds

PIP = (sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


async def ensure_engine(
    engine: str,
    home: Path,
    *,
    mode: ComputeMode | None = None,
    from_source: bool = False,
    triton: Path | None = None,
    allow_system_packages: bool = False,
) -> PreparedEngine:
    """Find, fetch or build an engine, and register it. ``mode`` None means a GPU if there is one;
    ``triton`` is the path of a Triton to use. Raises ``EngineUnknown``, ``EngineNotFound``,
    ``MachineUnfit``, ``FetchFailed``, ``LogUnusable``, ``CatalogUnusable``."""
    if engine == "triton":
        install = await ensure_triton(triton, home, lambda what: None)
        return await asyncio.to_thread(registered, home, install)
    mode = mode or ("cuda" if gpu.look().devices else "cpu")
    recipe = recipe_of(engine, mode, from_source=from_source)
    return await ensure_environment(recipe, home, allow_system_packages=allow_system_packages)


async def ensure_triton(
    configured: Path | None,
    home: Path,
    fetching: Callable[[str], None],
    *,
    ngc_root: Path = NGC_ROOT,
    pip: Sequence[str] = PIP,
) -> TritonInstall:
    """The server that ``find_triton`` finds. If there is none, it calls ``fetching`` and fetches
    the wheel's. Raises ``ProvisionError``."""
    try:
        return find_triton(configured, home, ngc_root)
    except NoEngine:
        what = f"none on this machine; fetching {wheel.SERVER_VERSION}"
        fetching(f"{what} ({wheel.WHEEL}, {wheel.DOWNLOAD_MB} MB) into {home}")
        await fetch_triton(home, pip)
        return find_triton(configured, home, ngc_root)


async def fetch_triton(home: Path, pip: Sequence[str] = PIP) -> None:
    """Put the wheel's server below ``home``. pip uses its configured index. A cancelled download
    leaves nothing behind. Raises ``MachineUnfit``, ``FetchFailed``, ``LogUnusable``."""
    check_platform()
    if not wheel.is_downloaded(home):
        if pip is PIP and importlib.util.find_spec("pip") is None:
            raise _not_fetched(
                f" {sys.executable} has no pip; give it one (python -m ensurepip), or name"
            )
        log = home / "logs" / "fetch-triton.log"
        fresh_log(log)
        with wheel.completing(wheel.wheel_dir(home)) as target:
            command = [*pip, "--target", str(target), *wheel.PIP_ARGUMENTS]
            # The target's file system has room; a container's /tmp may be in memory.
            env = command_environment({"TMPDIR": str(target.parent)})
            if not await succeeds("pip", command, env, log):
                raise _not_fetched(
                    f"\n{tail(log)}\nWithout a network, give pip a mirror or a folder of wheels"
                    " (PIP_INDEX_URL, PIP_FIND_LINKS), or name"
                )
    await asyncio.to_thread(wheel.lay_out, home)


def _not_fetched(why: str) -> FetchFailed:
    return FetchFailed(
        f"Cannot fetch {wheel.WHEEL}, the wheel that has the Triton server:{why} a Triton server"
        " with --triton PATH (TIDEGATE_TRITON)."
    )


def registered(home: Path, install: TritonInstall) -> PreparedEngine:
    """Register an installed server in the catalog. Raises ``CatalogUnusable``."""
    # The files that decide a server's behavior: its binary, its Python backend and the stub.
    backend = install.backend_dir / "python"
    stub = backend / "triton_python_backend_stub"
    files = [install.binary, *sorted(backend.glob("*.so")), stub]
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
