"""Finds the path of a model from its name."""

import contextlib
from pathlib import Path

from catalog.errors import CatalogUnusable, NoSuchModel
from catalog.models import ModelCatalog, ModelState
from catalog.paths import DEMO_CHECKPOINT

DEMO = "demo"


def resolve_model(text: str, home: Path) -> Path:
    """The checkpoint folder or GGUF file that ``text`` names.

    ``text`` may be ``demo``, a model registered below the state directory ``home`` by name or id, a
    folder or a ``.gguf`` file, in this order; ``./demo`` is always a folder. A registered model
    counts as used. Raises ``NoSuchModel``, ``CatalogUnusable``.
    """
    if text == DEMO:
        return DEMO_CHECKPOINT
    catalog = ModelCatalog(home)
    entry = catalog.find(text)
    if entry is not None:
        if entry.state is not ModelState.ACTIVE:
            raise NoSuchModel(
                f"the model {text!r} is {entry.state.value}"
                + (f" ({entry.problem})" if entry.problem else "")
                + f": tidegate models add {entry.source.removeprefix('hub:')} completes it"
            )
        with contextlib.suppress(CatalogUnusable):  # a read-only catalog can still serve
            catalog.touch(entry)
        return catalog.servable_path(entry)
    path = Path(text).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path.resolve()
    if path.is_file():
        raise NoSuchModel(
            f"{text} is a file, but not a GGUF model: give a .gguf file or a checkpoint's folder"
        )
    raise NoSuchModel(
        f"there is no model {text!r}: it is neither a folder nor a .gguf file, nor registered on"
        f" this machine; {catalog.what_there_is()} ({DEMO} is always there)"
    )
