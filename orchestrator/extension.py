"""Optional rooms: packages that the service finds but never names (OR-28).

A room is a package with a module ``extension`` that defines subclasses of ``Extension``. The
service finds these modules when it is built: to remove a room, delete its folder; to add one,
create its folder. A room's settings are a ``Section`` in its module ``section``, which is read
without the rest of the room.

::

    clips/                     extension.py  section.py
    orchestrator/sessions/     extension.py  section.py
    orchestrator/api/page/     extension.py

Rooms import the core; the core imports no room. ``tests/orchestrator/test_rooms.py`` checks the
imports and starts the service without each room.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from orchestrator.admission.admission import Admission
from orchestrator.admission.rate_limits import Limiter, Standing
from orchestrator.clock import Clock
from orchestrator.instances.registry import Registry
from orchestrator.settings import Settings
from orchestrator.settings.rooms import defined_in, modules_of_rooms
from orchestrator.sharing import Sharing
from orchestrator.tasks.job import Job, Prompt
from orchestrator.tasks.journal.file import JournalFile
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork
from orchestrator.telemetry.metrics import Metrics

if TYPE_CHECKING:  # only the edge speaks HTTP
    from aiohttp import web

Submit = Callable[[Job, Prompt], Awaitable[Task]]


@dataclass(frozen=True, slots=True)
class Core:
    """The parts of the core that rooms may build on."""

    settings: Settings
    clock: Clock
    rng: random.Random
    metrics: Metrics
    registry: Registry
    admission: Admission
    limiter: Limiter
    sharing: Sharing
    journal: JournalFile | None
    """The file of durable tasks; a room may keep its own files next to it."""
    is_simulated: bool
    """Whether instances are simulated, so that there is no Triton."""


class Host(Protocol):
    """The part of the service that rooms use."""

    rooms: "Sequence[Extension]"
    on_offered: list[Callable[[Task], None]]
    """Called with each accepted task."""
    task_over: asyncio.Event

    async def submit(self, job: Job, prompt: Prompt) -> Task:
        """Submit a request. Raises ``TidegateError``."""

    def cancel(self, task: Task) -> None:
        """Cancel a task. Idempotent."""


class Extension:
    """One optional room of one orchestrator. A room overrides the methods that it needs."""

    keeps: ClassVar[tuple[str, ...]] = ()
    """The ``ROOM_FIELDS`` that this room implements."""

    def __init__(self, core: Core) -> None:
        self.core = core

    @classmethod
    def is_wanted(cls, settings: Settings) -> bool:
        """Whether the settings enable this room; otherwise it is not built."""
        return True

    # ── the service's life ───────────────────────────────────────────────────────────────────

    def bind(self, host: Host) -> None:
        """Called once with the room's service, before the service starts."""

    def start(self) -> None:
        """Begin work; called on the event loop when the service starts to serve."""

    def upkeep(self) -> None:
        """Called about every 250 ms."""

    def end_hopeless(self, by: float) -> int:
        """End waiting work that will not be done at ``by``; returns how much it was."""
        return 0

    def end_all(self) -> None:
        """End all live work, because the service is shutting down."""

    async def close(self) -> None:
        """Close every connection and thread."""

    # ── what the service asks ────────────────────────────────────────────────────────────────

    @property
    def latest_end(self) -> float:
        """When the latest work with fetchable results ended, in seconds of the clock."""
        return 0.0

    def is_ready(self) -> bool:
        """Whether this room takes work even if no instance takes text."""
        return False

    def live(self) -> Iterable[AnyWork]:
        """Work of this room that has not ended."""
        return ()

    def cancel(self, work: AnyWork) -> None:
        """Cancel live work of this room on an API request. Idempotent (WP-2)."""

    def submit_of(self, job: Job) -> Submit | None:
        """The room's own way to submit a job; None for jobs of others."""
        return None

    def charge(self, task: Task) -> None:
        """Called before a request is queued. Raises ``TidegateError`` to refuse it."""

    def standings(self, key: str) -> Iterable[Standing]:
        """Limits of this room that every answer reports to a key."""
        return ()

    # ── what people are shown ────────────────────────────────────────────────────────────────

    def capabilities(self) -> Mapping[str, object]:
        """Fields to add to ``GET /v2/capabilities``."""
        return {}

    def describe(self, address: str, *, briefly: bool = False) -> Mapping[str, object]:
        """Fields for the description of an instance; ``briefly``: for the overview."""
        return {}

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────

    def attach(self, app: "web.Application") -> None:
        """Add the room's routes to ``app``, and the objects that their handlers read."""


def build_rooms(core: Core) -> list[Extension]:
    modules = modules_of_rooms("extension")
    kinds = [kind for module in modules for kind in defined_in(module, Extension)]
    return [kind(core) for kind in kinds if kind.is_wanted(core.settings)]
