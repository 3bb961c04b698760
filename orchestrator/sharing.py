"""The state that orchestrators share: none, unless the room ``state`` exists and is configured.

``Sharing`` is the interface: it answers for a single orchestrator, and all parts that could share
state ask it. A room overrides it (``sharing_of``), so that no other part knows whether there is a
store (OR-18, OR-28).
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from orchestrator.retention import ItemCall
from orchestrator.settings import Settings
from orchestrator.settings.rooms import modules_of_rooms
from orchestrator.tasks.journal.file import JournalFile
from orchestrator.tasks.journal.file_store import store_of
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
"""Serializes an item as it was when this function was created; runs on any thread."""

Lines = dict[tuple[str, str], bytes]
"""Lists of numbers (JSON), by page and name."""


class Shelf(Protocol):
    """Clients' items of one kind."""

    on_change: ItemCall
    """Called with the key and name of a new, changed or removed item."""
    on_use: ItemCall
    """Called with the key and name of an item whose use extends its lifetime."""

    @property
    def keep_s(self) -> float:
        """Seconds for which an unused item is kept."""

    def copier(self, key: str, name: str) -> Copier | None:
        """The copier of an item; None if the item is no longer here."""

    def adopt(self, key: str, name: str, copy: bytes) -> None:
        """Store another orchestrator's item. Raises ``DecodeError`` or ``TidegateError``."""

    def let_go(self, key: str, name: str) -> None:
        """Remove an item that another orchestrator has now."""

    def names(self) -> Iterable[tuple[str, str]]:
        """Keys and names of all items here."""


class Sums(Protocol):
    """Sums of tokens and cost, by name, that several orchestrators keep together."""

    def own(self) -> Mapping[str, tuple[int, float]]:
        """This process's part of each sum that it currently needs."""

    def hear(self, name: str, others: tuple[int, float]) -> None:
        """Set the part of a sum that comes from all other processes."""


class Sharing:
    """A single orchestrator, which shares no state: calls have no effect."""

    tag: str = ""
    """Prefix of the ids that are made here."""
    is_shared: bool = False
    """Whether durable tasks are in a store of several orchestrators instead of a file."""

    @property
    def fault(self) -> str:
        """Why the others are unreachable; empty if they are reachable or there are none."""
        return ""

    def store(self, file: JournalFile | None) -> JournalStore | None:
        """The store of durable tasks; None if there is none."""
        return None if file is None else store_of(file)

    def share(self, registry: "Registry", queue: "TaskQueue[Task]", limiter: "Limiter") -> None:
        """Start to share the instances' slots and the keys' limits."""

    def follow(self, runs: "Runs", metrics: "Metrics") -> None:
        """Share runs of calls with the others, and publish metrics of the shared state."""

    def keep(self, kind: str, shelf: Shelf) -> None:
        """Copy clients' items on ``shelf``, so that they survive this process."""

    def add_up(self, sums: Sums) -> None:
        """Share ``sums`` with the others."""

    async def write_lines(self, lines: Lines) -> None:
        """Write lines into shared pages: of two lines with the same name, the one with the larger
        first number stays. Raises ``NotReady``."""

    async def read_lines(self, page: str) -> Mapping[str, bytes]:
        """All lines of a page, by name. Raises ``NotReady``."""
        return {}

    async def take(self, task: Task) -> None:
        """Charge a request to the shared limits. Raises ``RateLimited``."""

    async def cordoned(self, address: str, grace_s: float) -> None:
        """Tell the others that an instance gets no new work."""

    async def uncordoned(self, address: str) -> None:
        """Tell the others that an instance is in use again."""

    def join(
        self,
        port: int,
        keys: str,
        take_on: Callable[[Sequence[UnfinishedTask]], None],
        may_take: Callable[[], bool],
    ) -> None:
        """Join the others; this process listens on ``port``. ``take_on`` gets tasks of others that
        this process must finish, whenever ``may_take`` allows. ``keys`` is a digest of its keys."""

    def on_lapsed(self, call: Callable[[], None]) -> None:
        """Register a function to call when this process was considered dead and is back."""

    def describe(self) -> dict[str, object] | None:
        """The shared state for ``/health``; None if there is none."""
        return None

    async def close(self) -> None:
        """Leave the others. Call it after all writes: others take over the rest."""


def make_sharing(settings: Settings, rng: random.Random, unix: Callable[[], float]) -> Sharing:
    """The ``Sharing`` for the settings. Blocks, but does not contact the store yet."""
    for module in modules_of_rooms("sharing"):
        made: Sharing | None = module.sharing_of(settings, rng, unix)
        if made is not None:
            return made
    return Sharing()
