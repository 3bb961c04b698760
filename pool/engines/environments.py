"""Installs engines that are Python packages, each in its own virtual environment.

    TIDEGATE_HOME/engines/<id>/            complete, verified by an import
    TIDEGATE_HOME/engines/<id>.partial/    in progress; pip resumes there after a kill

The id has a digest of all inputs of the build. Other pins or another Python thus give another
environment, and running engines keep theirs. A worker's other packages come from Tidegate's own
environment, after the engine's.
"""

import asyncio
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import msgspec

from catalog.atomic import sync_folder, sync_tree, write_atomically
from catalog.engines import (
    MANIFEST,
    ComputeMode,
    EngineCatalog,
    EngineEntry,
    EnvironmentVars,
    PreparedEngine,
    digest_of_packages,
    site_packages,
)
from catalog.errors import CatalogUnusable, FetchFailed
from catalog.shared_file import now_ms
from pool.engines.recipes import ENGINES, EngineRecipe, require_tools
from pool.engines.triton_wheel import alone
from pool.process.logs import fresh_log, tail
from pool.process.process import GuardedProcess, command_environment
from worker.engine_choice import choose_engine
from worker.environment import with_variables
from worker.settings import WorkerSettings

_OURS: Final = "zz-tidegate.pth"
"""Name of the path file that Python reads last, so that its packages are found last."""
_PIP: Final = (sys.executable, "-P", "-m", "pip")
"""Tidegate's own pip, which installs into the environment; the environment has no pip."""
_INSTALL: Final = ("install", "--quiet", "--disable-pip-version-check")


@dataclass(frozen=True, slots=True)
class EnvironmentProvider:
    """Creates the environment of a recipe with pip and its configured index."""

    recipe: EngineRecipe
    allow_system_packages: bool = False

    @property
    def name(self) -> str:
        return self.recipe.engine

    @property
    def id(self) -> str:
        recipe = self.recipe
        told = "\0".join(
            (sys.version, sys.base_prefix, recipe.requirements, *recipe.flags, recipe.package)
        )
        digest = hashlib.sha256(told.encode()).hexdigest()
        return f"{recipe.engine}-{recipe.compute_mode}-{digest[:8]}"

    async def ensure(self, home: Path) -> PreparedEngine:
        """Create the environment if it is missing, and register it. Raises ``MachineUnfit``,
        ``FetchFailed``, ``LogUnusable``, ``CatalogUnusable``."""
        folder = home / "engines" / self.id
        if not (folder / MANIFEST).is_file():
            await asyncio.to_thread(
                require_tools, self.recipe.tools, allowed=self.allow_system_packages
            )
            with alone(folder):
                if not folder.is_dir():
                    await self._make(home, folder)
        try:
            entry = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=EngineEntry)
        except (OSError, msgspec.MsgspecError) as error:
            raise FetchFailed(
                f"{folder} is no longer a complete environment ({folder / MANIFEST} cannot be read:"
                f" {error}): remove that folder, and run the command again"
            ) from error
        await asyncio.to_thread(EngineCatalog(home).put, entry)
        return prepared(entry)

    async def _make(self, home: Path, folder: Path) -> None:
        if importlib.util.find_spec("pip") is None:
            raise FetchFailed(
                f"the engine {self.name} cannot be installed: {sys.executable} has no pip; give it"
                " one (python -m ensurepip)"
            )
        partial = folder.with_name(folder.name + ".partial")
        log = home / "logs" / f"engine-{self.recipe.engine}.log"
        fresh_log(log)
        python = partial / "bin" / "python"
        packages = site_packages(partial)
        if not (packages.is_dir() and await self._runs([str(python), "-c", ""], log)):
            shutil.rmtree(partial, ignore_errors=True)
            base = getattr(sys, "_base_executable", None) or sys.executable
            await self._run([base, "-m", "venv", "--without-pip", str(partial)], log)
        requirements = partial / "requirements.txt"
        requirements.write_text(self.recipe.requirements)
        install = [*_PIP, "--python", str(python), *_INSTALL, *self.recipe.pip]
        # Next to the environment: a container's /tmp may be in memory, and vLLM unpacks gigabytes.
        spare = folder.with_name(folder.name + ".tmp")
        spare.mkdir(exist_ok=True)
        build = {**(self.recipe.build or {}), "TMPDIR": str(spare)}
        await self._run([*install, "-r", str(requirements)], log, build)
        shutil.rmtree(spare, ignore_errors=True)
        # In ASCII, as the interpreter of Triton's Python stub reads it.
        ours = os.fsencode(sysconfig.get_paths()["purelib"])
        (packages / _OURS).write_text(f"import os, sys; sys.path.append(os.fsdecode({ours!r}))\n")
        await self._run([str(python), "-P", "-c", f"import {self.recipe.module}"], log)
        _name_finally(partial, folder)
        entry = EngineEntry(
            id=folder.name,
            engine=self.recipe.engine,
            version=_version(packages, self.recipe.package),
            build_ref=f"pip {self.recipe.package}",
            created_ms=now_ms(),
            digest=digest_of_packages(packages),
            build_flags=self.recipe.flags,
            artifacts=(str(folder),),
            compute_mode=self.recipe.compute_mode,
            binary=str(folder / "bin" / "python"),
        )
        write_atomically(partial / MANIFEST, msgspec.json.encode(entry))
        await asyncio.to_thread(sync_tree, partial)
        partial.rename(folder)
        sync_folder(folder.parent)

    async def _run(
        self, command: Sequence[str], log: Path, more: EnvironmentVars | None = None
    ) -> None:
        if not await self._runs(command, log, more):
            raise FetchFailed(
                f"the engine {self.name} cannot be installed:\n{tail(log)}\n(more in {log})."
                " Without a network give pip a mirror or a folder of wheels (PIP_INDEX_URL,"
                " PIP_FIND_LINKS)."
                " The installed packages are kept: run the same command again to resume."
            )

    async def _runs(
        self, command: Sequence[str], log: Path, more: EnvironmentVars | None = None
    ) -> bool:
        # The test must not find our packages instead of the environment's.
        env = command_environment({**(more or {}), "PYTHONPATH": None, "VIRTUAL_ENV": None})
        process = await GuardedProcess.start(f"engine {self.name}", command, env=env, log=log)
        try:
            return await process.wait() == 0
        finally:
            await process.kill()


def prepared(entry: EngineEntry) -> PreparedEngine:
    """An engine of the catalog, ready to be started."""
    binary = Path(entry.binary)
    return PreparedEngine(
        name=entry.engine,
        version=entry.version,
        build_ref=entry.build_ref,
        digest=entry.digest,
        flags=entry.build_flags,
        compute_mode=entry.compute_mode,
        binary=binary,
        catalog_id=entry.id,
        environment={} if entry.engine == "triton" else _variables(binary.parents[1]),
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
    Raises ``CatalogUnusable``.
    """
    try:
        settings = with_variables(WorkerSettings, variables)
    except ValueError:
        return {}  # the worker reports the error
    engine = settings.engine
    if engine == "auto":
        engine = choose_engine(settings, _packages_of("vllm", "cuda", home)).name
    return environment_if_made(engine, home, settings.device)


def _packages_of(engine: str, mode: ComputeMode, home: Path) -> Path | None:
    """The packages of the newest environment for an engine; None without one."""
    try:
        entries = EngineCatalog(home).entries()
    except CatalogUnusable:
        return None
    its = [one for one in entries if (one.engine, one.compute_mode) == (engine, mode)]
    return site_packages(Path(its[-1].binary).parents[1]) if its else None


def _variables(folder: Path) -> EnvironmentVars:
    path = os.pathsep.join(filter(None, [str(folder / "bin"), os.environ.get("PATH")]))
    return {"PATH": path, "VIRTUAL_ENV": str(folder)}


def _name_finally(partial: Path, folder: Path) -> None:
    """Write the final folder's path into the scripts."""
    for script in (partial / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        text = script.read_bytes()
        if str(partial).encode() in text:
            script.write_bytes(text.replace(str(partial).encode(), str(folder).encode()))


def _version(packages: Path, package: str) -> str:
    for each in distributions(path=[str(packages)]):
        if (each.metadata["Name"] or "").lower().replace("_", "-") == package:
            return each.version
    return "unknown"
