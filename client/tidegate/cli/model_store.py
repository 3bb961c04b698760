"""``tidegate models list``, ``show``, ``verify``, ``load``, ``remove``: what they do.

Imported after ``runtime.add_to_path``, which finds ``orchestrator``.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.filesize import decimal as size
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from catalog.errors import NoMemory, ProvisionError, StagingFailed
from catalog.model_entry import ModelEntry, ModelState
from catalog.models import ModelCatalog
from catalog.paths import state_dir
from catalog.verify import verify_model
from pool.artifacts.preload import preload
from pool.artifacts.room import users_of
from tidegate.cli.terminal import console, duration, print_json, table

FAILED = 1


def listing(*, as_json: bool) -> int:
    def work(catalog: ModelCatalog) -> int:
        entries = catalog.entries()
        if as_json:
            print_json([described(catalog, entry) for entry in entries])
            return 0
        columns = ("MODEL", "STATE", "FORMAT", "SIZE", "LICENCE", "USED", "SOURCE")
        rows = [_row(catalog, entry) for entry in entries]
        console().print(table(columns, rows, numbers=("SIZE", "USED")))
        return 0

    return run_on_catalog("list", work)


def show(name: str, *, as_json: bool) -> int:
    def work(catalog: ModelCatalog) -> int:
        entry = catalog.get(name)
        if as_json:
            print_json(described(catalog, entry))
            return 0
        facts = {
            "model": entry.name,
            "id": entry.id,
            "state": _state(catalog, entry),
            "problem": entry.problem,
            "format": entry.format.value,
            "source": entry.source,
            "revision": entry.revision,
            "licence": entry.licence or "not stated",
            "size": size(entry.bytes),
            "verified": _ago(entry.verified_ms),
            "used": _ago(entry.used_ms),
            "digest": entry.digest,
            "path": str(catalog.servable_path(entry)),
        }
        out = console()
        for fact, value in facts.items():
            if value:
                out.print(f"{fact:<12}{value}", soft_wrap=True)
        for file in entry.files:
            out.print(f"  {size(file.bytes):>9}  {file.sha256[:12]:<12}  {file.path}")
        return 0

    return run_on_catalog("show", work)


def verify(names: Sequence[str], *, as_json: bool) -> int:
    def work(catalog: ModelCatalog) -> int:
        chosen = [catalog.get(name) for name in names] or [
            entry for entry in catalog.entries() if entry.state is not ModelState.STAGING
        ]
        seen = []
        for entry in chosen:
            with catalog.claim(entry.id):
                seen.append(verify_model(catalog, entry))
            if not as_json:
                console().print(f"{entry.name}: {seen[-1].problem or 'every byte is as it was'}")
        if as_json:
            print_json([described(catalog, entry) for entry in seen])
        return FAILED if any(entry.state is ModelState.BROKEN for entry in seen) else 0

    return run_on_catalog("verify", work)


def load(names: Sequence[str], *, as_json: bool) -> int:
    def work(catalog: ModelCatalog) -> int:
        entries = [catalog.get(name) for name in names]
        missing = [entry for entry in entries if not preload_model(catalog, entry)]
        if as_json:
            print_json([described(catalog, entry) for entry in entries])
        else:
            for entry in entries:
                if entry not in missing:
                    console().print(f"{entry.name}: in memory")
        return FAILED if missing else 0

    return run_on_catalog("load", work)


def remove(names: Sequence[str], *, force: bool, as_json: bool) -> int:
    def work(catalog: ModelCatalog) -> int:
        entries = [catalog.get(name) for name in names]
        for entry in entries:
            if not force and (users := users_of(catalog.path_of(entry))):
                raise StagingFailed(
                    f"{entry.name} is in use by process {users[0]}: end that first, or give --force"
                )
        for entry in entries:
            catalog.remove(entry)
            if not as_json:
                console().print(f"removed {entry.name} ({size(entry.bytes)})")
        if as_json:
            print_json({"removed": [entry.id for entry in entries]})
        return 0

    return run_on_catalog("remove", work)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    err = console(to_stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        yield bar


def preload_model(catalog: ModelCatalog, entry: ModelEntry) -> bool:
    """Read a model into memory; False, with a message on stderr, where it does not fit."""
    files = [catalog.path_of(entry) / file.path for file in entry.files]
    with progress_bar() as bar:
        task = bar.add_task(f"{entry.name} into memory", total=entry.bytes)
        try:
            preload(files, lambda count: bar.advance(task, count))
        except NoMemory as error:
            print(f"tidegate models: {entry.name} is not in memory: {error}", file=sys.stderr)
            return False
    return True


def run_on_catalog(command: str, work: Callable[[ModelCatalog], int]) -> int:
    try:
        return work(ModelCatalog(state_dir()))
    except (ProvisionError, OSError) as error:  # a file that goes while it is looked at, for one
        print(f"tidegate models {command}: {error}", file=sys.stderr)
        return FAILED


def described(catalog: ModelCatalog, entry: ModelEntry) -> dict[str, object]:
    return {
        **msgspec.to_builtins(entry),
        "bytes": entry.bytes,
        "path": str(catalog.servable_path(entry)),
    }


def _row(catalog: ModelCatalog, entry: ModelEntry) -> tuple[str, ...]:
    return (
        entry.name,
        _state(catalog, entry),
        entry.format.value,
        size(entry.bytes),
        entry.licence or "–",
        _ago(entry.used_ms) or "–",
        entry.source,
    )


def _state(catalog: ModelCatalog, entry: ModelEntry) -> str:
    if entry.state is ModelState.STAGING and not catalog.is_claimed(entry.id):
        return "interrupted"
    return entry.state.value


def about(entry: ModelEntry) -> str:
    licence = f"licence {entry.licence}" if entry.licence else "its licence is not stated"
    return f"{size(entry.bytes)}, {entry.format.value}, {licence}"


def _ago(unix_ms: int) -> str:
    return f"{duration(1000 * time.time() - unix_ms)} ago" if unix_ms else ""
