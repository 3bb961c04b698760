"""``tidegate models add``: what it does.

Imported after ``runtime.add_to_path``, which finds ``orchestrator``.
"""

import asyncio
import sys

from rich.filesize import decimal as size
from rich.progress import Progress, TaskID

from catalog.models import ModelCatalog
from pool.artifacts import staging
from pool.artifacts.source import Choice, Listing
from tidegate.cli.model_store import about, described, preload_model, progress_bar, run_on_catalog
from tidegate.cli.terminal import console, print_json


def add(request: staging.AddRequest, *, load: bool, as_json: bool) -> int:
    """Add a model to the catalog; returns the exit status, like every command here."""

    def work(catalog: ModelCatalog) -> int:
        with progress_bar() as bar:
            shown = _Shown(bar)
            entry = asyncio.run(staging.add_model(catalog, request, shown))
        if load:
            preload_model(catalog, entry)
        if as_json:
            print_json(described(catalog, entry))
        else:
            out = console()
            out.print(f"{entry.name}: {about(entry)}")
            out.print(f"at {catalog.servable_path(entry)}", soft_wrap=True)
            out.print(f"try it: tidegate up --model {entry.name}")
        return 0

    return run_on_catalog("add", work)


class _Shown(staging.Progress):
    """Shows what will be fetched as a line, and how far it is as a bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def chosen(self, listing: Listing, choice: Choice) -> None:
        about = f"{choice.format.value}, {len(choice.files)} files, {size(choice.bytes)}"
        print(
            f"{listing.source.removeprefix('hub:')}: {about}, licence {listing.licence or '–'}",
            file=sys.stderr,
        )
        self._task = self._bar.add_task(listing.name, total=choice.bytes)

    def came(self, count: int) -> None:
        if self._task is not None:
            self._bar.advance(self._task, count)
