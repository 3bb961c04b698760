"""Checks whether a registered model is still what it was."""

from pathlib import Path

import msgspec

from catalog.checks import check_formats, digests_of
from catalog.errors import DamagedModel, StagingFailed
from catalog.model_entry import ModelEntry, ModelState
from catalog.models import ModelCatalog
from catalog.shared_file import now_ms


def verify_model(
    catalog: ModelCatalog, entry: ModelEntry, threads: int | None = None
) -> ModelEntry:
    """Read every byte again; returns the new entry, ``BROKEN`` with the reason or ``ACTIVE``.

    ``threads``: see ``ModelCatalog.digest_of``. Raises ``StagingFailed`` for a model that is not
    complete, ``CatalogUnusable``.
    """
    if entry.state is ModelState.STAGING:
        raise StagingFailed(f"{entry.name} is not complete yet: add it again, which goes on")
    folder = catalog.path_of(entry)
    problem = _problem(folder, entry)
    if not problem and catalog.digest_of(entry, threads) != entry.digest:
        problem = "files were added to it that engines read"
    state = ModelState.BROKEN if problem else ModelState.ACTIVE
    verified_ms = now_ms()
    catalog.update(entry.id, state=state, problem=problem, verified_ms=verified_ms)
    return msgspec.structs.replace(entry, state=state, problem=problem, verified_ms=verified_ms)


def _problem(folder: Path, entry: ModelEntry) -> str:
    """The first problem found; empty if there is none."""
    for file in entry.files:
        path = folder / file.path
        try:
            if path.stat().st_size != file.bytes:
                return f"{file.path} has {path.stat().st_size} bytes and should have {file.bytes}"
            if digests_of(path).sha256 != file.sha256:
                return f"{file.path} has changed: its SHA-256 is another one"
        except OSError as error:
            return f"{file.path} cannot be read: {error.strerror}"
    try:
        check_formats(folder, [file.path for file in entry.files])
    except DamagedModel as error:
        return str(error)
    return ""
