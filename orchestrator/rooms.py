"""Finds the modules of optional rooms by their file names (``orchestrator.extension``)."""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

_PLACES = ("*", "orchestrator/*", "orchestrator/api/*", "orchestrator/api/*/*")
"""Where rooms are, from the folder in which ``orchestrator`` is."""
_NOT_ROOMS = ("orchestrator",)


@cache
def modules_of_rooms(name: str) -> tuple[ModuleType, ...]:
    """The module called ``name`` of each room that is there and has one, by the rooms' paths. Reads
    folders and imports the first time; nothing after that."""
    root = Path(__file__).parents[1]
    found = {path for place in _PLACES for path in root.glob(f"{place}/{name}.py")}
    dotted = {".".join(path.relative_to(root).with_suffix("").parts) for path in found}
    own = {f"{room}.{name}" for room in _NOT_ROOMS}
    return tuple(import_module(module) for module in sorted(dotted - own))


def defined_in(module: ModuleType, kind: type[T]) -> list[type[T]]:
    """The subclasses of ``kind`` that ``module`` itself defines."""
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, kind) and each.__module__ == module.__name__
    ]
