"""``tidegate engines``: what its commands do.

Imported after ``runtime.add_to_path``, which finds ``orchestrator``.
"""

import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from catalog.engine_entry import ComputeMode
from catalog.engines import EngineCatalog
from catalog.errors import ProvisionError
from catalog.paths import DEMO_CHECKPOINT, state_dir
from tidegate.cli.interrupt import importing
from tidegate.cli.terminal import console, duration, print_json, table

FAILED = 1


def ensure(
    engine: str,
    device: str | None,
    *,
    from_source: bool,
    triton: Path | None,
    image: str,
    allow_system_packages: bool,
    as_json: bool,
) -> int:
    """Find an engine, or make it; returns the exit status, like every command here."""
    with importing():
        from pool.engines.providers import EngineRequest, provider_of
        from pool.engines.triton_provider import docker_command
    home = state_dir()
    mode: ComputeMode | None = None if device is None else "cuda" if device == "cuda" else "cpu"

    def work() -> int:
        if image:
            command = docker_command(image, DEMO_CHECKPOINT, gpus=mode != "cpu")
            print_json(command) if as_json else print(shlex.join(command))
            return 0
        request = EngineRequest(engine, mode, from_source, triton, allow_system_packages)
        provider = provider_of(request, home)
        print(f"{engine}: looking for it, else making it (minutes)", file=sys.stderr)
        made = asyncio.run(provider.ensure(home))
        return show(made.catalog_id, as_json=as_json)

    return _told("ensure", work)


def listing(*, as_json: bool) -> int:
    def work() -> int:
        entries = EngineCatalog(state_dir()).entries()
        if as_json:
            print_json(entries)
            return 0
        columns = ("ENGINE", "VERSION", "DEVICE", "AGE", "FROM", "ID")
        rows = [
            (
                entry.engine,
                entry.version,
                entry.compute_mode,
                duration(1000 * time.time() - entry.created_ms),
                entry.build_ref,
                entry.id,
            )
            for entry in entries
        ]
        console().print(table(columns, rows, numbers=("AGE",)))
        return 0

    return _told("list", work)


def show(name: str, *, as_json: bool) -> int:
    with importing():
        from pool.engines.environments import prepared

    def work() -> int:
        entry = EngineCatalog(state_dir()).get(name)
        if as_json:
            print_json(entry)
            return 0
        facts = {
            "engine": f"{entry.engine} {entry.version}",
            "id": entry.id,
            "from": entry.build_ref,
            "device": entry.compute_mode,
            "flags": " ".join(entry.build_flags),
            "digest": entry.digest,
            "binary": entry.binary,
            "folders": " ".join(entry.artifacts),
            "run with": " ".join(
                f"{key}={shlex.quote(value.split(':')[0])}{':…' if ':' in value else ''}"
                for key, value in prepared(entry).environment.items()
            ),
        }
        for fact, value in facts.items():
            if value:
                console().print(f"{fact:<12}{value}", soft_wrap=True)
        return 0

    return _told("show", work)


def verify(names: Sequence[str], *, as_json: bool) -> int:
    with importing():
        from pool.engines.verify import verify_engine

    def work() -> int:
        home = state_dir()
        catalog = EngineCatalog(home)
        entries = [catalog.get(name) for name in names] or catalog.entries()
        problems = {entry.id: verify_engine(entry, home) for entry in entries}
        if as_json:
            print_json(problems)
        else:
            for id, problem in problems.items():
                console().print(f"{id}: {problem or 'every file is as it was'}")
        return FAILED if any(problems.values()) else 0

    return _told("verify", work)


def show_toolchain(*, refresh: bool, as_json: bool) -> int:
    with importing():
        from pool.engines.toolchain import toolchain

    def work() -> int:
        found = toolchain(state_dir(), refresh=refresh)
        if as_json:
            print_json(found)
            return 0
        out = console()
        out.print(f"{'gpus':<12}{', '.join(found.gpus) or 'none'}")
        out.print(f"{'driver':<12}{f'CUDA {found.cuda}' if found.cuda else 'none'}")
        for name, tool in found.tools.items():
            out.print(f"{name:<12}{tool.version or '–'}  {tool.path}", soft_wrap=True)
        return 0

    return _told("toolchain", work)


def _told(command: str, work: Callable[[], int]) -> int:
    try:
        return work()
    except ProvisionError as error:
        print(f"tidegate engines {command}: {error}", file=sys.stderr)
        return FAILED
