"""What one orchestrator shares with others: nothing, unless the room ``state`` is there and set up.

``Sharing`` is the seam: it answers as an orchestrator that is alone, and everything that could be
shared asks it. A room overrides it (``sharing_of``), so that nothing else knows whether there is a
store (OR-18, OR-28).
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from orchestrator.retention import ItemCall
from orchestrator.settings import Settings
from orchestrator.settings.rooms import modules_of_rooms
from orchestrator.tasks.journal.file import JournalFile
from orchestrator.tasks.journal.file_store import FileStore
from orchestrator.tasks.journal.records import UnfinishedTask
from orchestrator.tasks.journal.store import JournalStore
from orchestrator.tasks.task import Task

if TYPE_CHECKING:
    from orchestrator.admission.rate_limits import Limiter
    from orchestrator.instances.registry import Registry
    from orchestrator.queue.task_queue import TaskQueue
    from orchestrator.tasks.runs import Runs
    from orchestrator.telemetry.metrics import Metrics

Copier = Callable[[], bytes]
"""Makes the copy of an item, on any thread, as the item was when this was made."""

Lines = dict[tuple[str, str], bytes]
"""Lists of numbers (JSON), by page and name."""


class Shelf(Protocol):
    """Items of one kind that clients keep here."""

    on_change: ItemCall
    """Called with the key and name of an item that is new, has changed, or is gone."""
    on_use: ItemCall
    """Called with the key and name of an item that is kept for longer because it was used."""

    @property
    def keep_s(self) -> float:
        """How long an item is kept without being used, in seconds."""

    def copier(self, key: str, name: str) -> Copier | None:
        """Makes a copy of an item; None where it is not kept here any more."""

    def adopt(self, key: str, name: str, copy: bytes) -> None:
        """Keep another orchestrator's item. Raises ``DecodeError`` or ``TidegateError``."""

    def let_go(self, key: str, name: str) -> None:
        """Forget an item that another orchestrator has now."""

    def names(self) -> Iterable[tuple[str, str]]:
        """Keys and names of all items that are kept here."""


class Sums(Protocol):
    """Sums of tokens and cost, by name, that several orchestrators keep together."""

    def own(self) -> Mapping[str, tuple[int, float]]:
        """This process's part of each sum that matters here at the moment."""

    def hear(self, name: str, others: tuple[int, float]) -> None:
        """Take in all other processes' part of a sum."""


class Sharing:
    """What an orchestrator that is alone shares: nothing. Every call has no effect."""

    tag: str = ""
    """What the ids begin with that are made here."""
    is_shared: bool = False
    """Whether durable tasks are in a store of several orchestrators, and not in a file."""
    listens_at: tuple[str, int] | None = None
    """Host and port of this process alone, where several share the service's port."""
    process: str = ""
    """Name of this process among those at the service's port; empty without others."""

    @property
    def processes(self) -> int:
        """How many processes share the service's port, with this one."""
        return 1

    @property
    def fault(self) -> str:
        """Why the others cannot be reached; empty if they can be, or there are none."""
        return ""

    def store(self, file: JournalFile | None) -> JournalStore | None:
        """The store of durable tasks; None without one."""
        return None if file is None else FileStore(file)

    def share(self, registry: "Registry", queue: "TaskQueue[Task]", limiter: "Limiter") -> None:
        """Share the instances' slots and keys' limits, from the start."""

    def follow(self, runs: "Runs", metrics: "Metrics") -> None:
        """Continue runs of calls at the others, and publish metrics of the shared state."""

    def keep(self, kind: str, shelf: Shelf) -> None:
        """Copy what clients keep on ``shelf``, so that it outlives this process."""

    def add_up(self, sums: Sums) -> None:
        """Keep ``sums`` together with the others."""

    async def write_lines(self, lines: Lines) -> None:
        """Write lines into pages that all have together: of two of one name, that with the greater
        first number stays. Raises ``NotReady``."""

    async def read_lines(self, page: str) -> Mapping[str, bytes]:
        """All lines of a page, by name. Raises ``NotReady``."""
        return {}

    async def take(self, task: Task) -> None:
        """Take a request from the limits that hold for all together. Raises ``RateLimited``."""

    async def cordoned(self, address: str, grace_s: float) -> None:
        """Tell the others that an instance gets no new work."""

    async def uncordoned(self, address: str) -> None:
        """Tell the others that an instance is in use again."""

    def take_lead(self) -> None:
        """Tell the other processes at this port that this one keeps what one process keeps."""

    def is_of_member(self, item_id: str) -> bool:
        """Whether an id was made by an orchestrator that is known here."""
        return True

    def join(
        self,
        port: int,
        keys: str,
        take_on: Callable[[Sequence[UnfinishedTask]], None],
        may_take: Callable[[], bool],
    ) -> None:
        """Join the others, listening on ``port``. ``take_on`` gets tasks of others that this
        process must finish, whenever it ``may_take`` any. ``keys`` is a digest of its keys."""

    def on_lapsed(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when this process was taken for dead and is back."""

    def describe(self) -> dict[str, object] | None:
        """The shared state as ``/health`` shows it; None without one."""
        return None

    async def close(self) -> None:
        """Leave. Call it once everything is written: others take over the rest."""


def make_sharing(settings: Settings, rng: random.Random, unix: Callable[[], float]) -> Sharing:
    """What the settings have this orchestrator share. Blocks, and asks no store anything yet."""
    for module in modules_of_rooms("sharing"):
        made: Sharing | None = module.sharing_of(settings, rng, unix)
        if made is not None:
            return made
    return Sharing()
