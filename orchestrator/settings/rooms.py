"""Optional rooms (``orchestrator.extension``): finds their modules by file name, and defines the
base class of their settings."""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from worker.environment import Section

if TYPE_CHECKING:
    from orchestrator.settings import Settings


T = TypeVar("T")

_PLACES = ("*", "orchestrator/*", "orchestrator/api/*", "orchestrator/api/*/*")
"""Paths of rooms, relative to the parent folder of ``orchestrator``."""


@cache
def modules_of_rooms(name: str) -> tuple[ModuleType, ...]:
    """The module called ``name`` of each installed room that has one, sorted by path. The first
    call reads folders and imports the modules; later calls return the cached result."""
    root = Path(__file__).parents[2]
    found = {path for place in _PLACES for path in root.glob(f"{place}/{name}.py")}
    dotted = {".".join(path.relative_to(root).with_suffix("").parts) for path in found}
    dotted.discard(f"orchestrator.{name}")  # the service itself is no room
    return tuple(import_module(module) for module in sorted(dotted))


def defined_in(module: ModuleType, kind: type[T]) -> list[type[T]]:
    """The subclasses of ``kind`` that ``module`` defines, without imported ones."""
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, kind) and each.__module__ == module.__name__
    ]


class RoomSection(Section):
    """A room's table in ``tidegate.toml``. The room's module ``section`` defines it."""

    table: ClassVar[str]
    """Name of the table."""

    @property
    def keeps_durable_tasks(self) -> bool:
        """Whether this room stores durable tasks, so that they need no file."""
        return False

    def check(self, settings: "Settings") -> None:
        """Check this section against all others. Raises ``ValueError``."""
