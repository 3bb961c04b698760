"""Settings of optional rooms (``orchestrator.extension``)."""

from typing import TYPE_CHECKING, ClassVar

from worker.environment import Section

if TYPE_CHECKING:
    from orchestrator.settings import Settings


class RoomSection(Section):
    """A room's table of ``tidegate.toml``. Defined in the room's module ``section``."""

    table: ClassVar[str]
    """Name of the table."""

    @property
    def keeps_durable_tasks(self) -> bool:
        """Whether durable tasks are kept by this room, and need no file."""
        return False

    def check(self, settings: "Settings") -> None:
        """Check this section together with all others. Raises ``ValueError``."""
