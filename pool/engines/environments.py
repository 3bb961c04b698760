"""Installs engines that are Python packages, each in its own virtual environment.

    TIDEGATE_HOME/engines/<id>/            complete, verified by an import
    TIDEGATE_HOME/engines/<id>.partial/    in progress; pip resumes there after a kill

The id has a digest of all inputs of the build. Other pins or another Python thus give another
environment, and running engines keep theirs. A worker's other packages come from Tidegate's own
environment, after the engine's.
"""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import msgspec

from catalog.atomic import sync_folder, sync_tree, write_atomically
from catalog.engines import (
    MANIFEST,
    EngineCatalog,
    EngineEntry,
    EnvironmentVars,
    PreparedEngine,
    digest_of_packages,
    site_packages,
)
from catalog.errors import CatalogUnusable, FetchFailed
from catalog.manifests import now_ms
from pool.engines.recipes import ENGINES, EngineRecipe, require_tools
from pool.engines.triton_wheel import alone
from pool.process.logs import fresh_log, tail
from pool.process.process import command_environment, succeeds
from worker.engine_choice import choose_engine
from worker.environment import with_variables
from worker.settings import WorkerSettings

_OURS: Final = "zz-tidegate.pth"
"""Name of the path file that Python reads last, so that its packages are found last."""
_PIP: Final = (sys.executable, "-P", "-m", "pip")
"""Tidegate's own pip, which installs into the environment; the environment has no pip."""
_INSTALL: Final = ("install", "--quiet", "--disable-pip-version-check")


async def ensure_environment(
    recipe: EngineRecipe, home: Path, *, allow_system_packages: bool = False
) -> PreparedEngine:
    """Create the environment of a recipe if it is missing, with pip and its configured index, and
    register it. Raises ``MachineUnfit``, ``FetchFailed``, ``LogUnusable``, ``CatalogUnusable``."""
    folder = home / "engines" / recipe.id
    if not (folder / MANIFEST).is_file():
        await asyncio.to_thread(require_tools, recipe.tools, allowed=allow_system_packages)
        with alone(folder):
            if not folder.is_dir():
                await _make(recipe, home, folder)
    try:
        entry = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=EngineEntry)
    except (OSError, msgspec.MsgspecError) as error:
        raise FetchFailed(
            f"{folder} is no longer a complete environment ({folder / MANIFEST} cannot be read:"
            f" {error}): remove that folder, and run the command again"
        ) from error
    return prepared(entry)


async def _make(recipe: EngineRecipe, home: Path, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed(
            f"the engine {recipe.engine} cannot be installed: {sys.executable} has no pip; give it"
            " one (python -m ensurepip)"
        )
    log = home / "logs" / f"engine-{recipe.engine}.log"
    fresh_log(log)

    async def runs(*command: str, **variables: str) -> bool:
        # The test must not find our packages instead of the environment's.
        env = command_environment({**variables, "PYTHONPATH": None, "VIRTUAL_ENV": None})
        return await succeeds(f"engine {recipe.engine}", command, env, log)

    async def run(*command: str, **variables: str) -> None:
        if not await runs(*command, **variables):
            raise FetchFailed(
                f"the engine {recipe.engine} cannot be installed:\n{tail(log)}\n(more in {log})."
                " Without a network give pip a mirror or a folder of wheels (PIP_INDEX_URL,"
                " PIP_FIND_LINKS)."
                " The installed packages are kept: run the same command again to resume."
            )

    partial = folder.with_name(folder.name + ".partial")
    python = str(partial / "bin" / "python")
    packages = site_packages(partial)
    if not (packages.is_dir() and await runs(python, "-c", "")):
        shutil.rmtree(partial, ignore_errors=True)
        base = getattr(sys, "_base_executable", None) or sys.executable
        await run(base, "-m", "venv", "--without-pip", str(partial))
    requirements = partial / "requirements.txt"
    requirements.write_text(recipe.requirements)
    # Next to the environment: a container's /tmp may be in memory, and vLLM unpacks gigabytes.
    spare = folder.with_name(folder.name + ".tmp")
    spare.mkdir(exist_ok=True)
    pip = (*_PIP, "--python", python, *_INSTALL, *recipe.pip, "-r", str(requirements))
    await run(*pip, **recipe.build, TMPDIR=str(spare))
    shutil.rmtree(spare, ignore_errors=True)
    # In ASCII, as the interpreter of Triton's Python stub reads it.
    ours = os.fsencode(sysconfig.get_paths()["purelib"])
    (packages / _OURS).write_text(f"import os, sys; sys.path.append(os.fsdecode({ours!r}))\n")
    await run(python, "-P", "-c", f"import {recipe.module}")
    _name_finally(partial, folder)
    versions = (each.version for each in distributions(name=recipe.package, path=[str(packages)]))
    entry = EngineEntry(
        id=folder.name,
        engine=recipe.engine,
        version=next(versions, "unknown"),
        build_ref=f"pip {recipe.package}",
        created_ms=now_ms(),
        digest=digest_of_packages(packages),
        build_flags=recipe.flags,
        artifacts=(str(folder),),
        compute_mode=recipe.compute_mode,
        binary=str(folder / "bin" / "python"),
    )
    write_atomically(partial / MANIFEST, msgspec.json.encode(entry))
    await asyncio.to_thread(sync_tree, partial)
    partial.rename(folder)
    sync_folder(folder.parent)


def prepared(entry: EngineEntry) -> PreparedEngine:
    """An engine of the catalog, ready to be started."""
    binary = Path(entry.binary)
    environment: EnvironmentVars = {}
    if entry.engine != "triton":
        folder = binary.parents[1]
        path = os.pathsep.join(filter(None, [str(folder / "bin"), os.environ.get("PATH")]))
        environment = {"PATH": path, "VIRTUAL_ENV": str(folder)}
    return PreparedEngine(
        name=entry.engine,
        version=entry.version,
        build_ref=entry.build_ref,
        digest=entry.digest,
        flags=entry.build_flags,
        compute_mode=entry.compute_mode,
        binary=binary,
        catalog_id=entry.id,
        environment=environment,
    )


def environment_if_made(name: str, home: Path, device: str = "") -> EnvironmentVars:
    """Variables that make Triton's Python stub run an engine's packages: ``PATH`` with its
    environment first, and ``VIRTUAL_ENV``. The stub asks the first Python on ``PATH`` where its
    packages are.

    ``name`` is any value of ``TIDEGATE_WORKER__ENGINE``. Empty if there is no environment; then the
    stub uses the packages of the running Python. Of several, it is the newest for ``device``
    (``cpu``, ``cuda``), or the newest if none is for it. Raises ``CatalogUnusable``."""
    if name not in ENGINES:
        return {}
    its = [entry for entry in EngineCatalog(home).entries() if entry.engine == name]
    fitting = [entry for entry in its if entry.compute_mode == device]
    return prepared((fitting or its)[-1]).environment if its else {}


def environment_for(variables: Mapping[str, str], home: Path) -> EnvironmentVars:
    """Variables that run a worker's engine in its own environment.

    ``variables`` are the worker's ``TIDEGATE_WORKER__…``; if they state no engine, it is the
    worker's choice. Empty in the cases of ``environment_if_made``, and if the settings are invalid.
    Raises ``CatalogUnusable``."""
    try:
        settings = with_variables(WorkerSettings, variables)
    except ValueError:
        return {}  # the worker reports the error
    engine = settings.engine
    if engine == "auto":
        engine = choose_engine(settings, _vllm_packages(home)).name
    return environment_if_made(engine, home, settings.device)


def _vllm_packages(home: Path) -> Path | None:
    """The packages of vLLM's newest environment for CUDA; None without one."""
    with contextlib.suppress(CatalogUnusable):
        for entry in reversed(EngineCatalog(home).entries()):
            if (entry.engine, entry.compute_mode) == ("vllm", "cuda"):
                return site_packages(Path(entry.binary).parents[1])
    return None


def _name_finally(partial: Path, folder: Path) -> None:
    """Write the final folder's path into the scripts."""
    for script in (partial / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            script.write_bytes(script.read_bytes().replace(bytes(partial), bytes(folder)))
