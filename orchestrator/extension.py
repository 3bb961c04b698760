"""Optional rooms: packages that the service finds and never names (OR-28).

A room is a package with a module ``extension`` that defines one subclass of ``Extension``. The
service looks for these modules when it is built, so a room is removed by deleting its folder, and
added by putting one there. Settings of a room are a ``Section`` in its module ``section``, which is
read without the rest of the room.

::

    clips/                     extension.py  section.py
    orchestrator/sessions/     extension.py  section.py
    orchestrator/api/page/     extension.py

Rooms import the core; the core imports no room. ``tests/orchestrator/test_rooms.py`` looks at the
imports, and starts the service without each room.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
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
    """Whether instances are simulated: there is no Triton to ask."""


class Host(Protocol):
    """The service, as far as its rooms need it."""

    rooms: "Sequence[Extension]"
    on_offered: list[Callable[[Task], None]]
    """Called with each task that is taken on."""
    task_over: asyncio.Event

    async def submit(self, job: Job, prompt: Prompt) -> Task:
        """Offer a request. Raises ``TidegateError``."""

    def cancel(self, task: Task) -> None:
        """Cancel a task. Idempotent."""


class Extension:
    """One optional room of one orchestrator. A room overrides what concerns it."""

    led: ClassVar[tuple[str, ...]] = ()
    """Paths below which one process answers for all that share a port."""

    keeps: ClassVar[tuple[str, ...]] = ()
    """Those of ``ROOM_FIELDS`` that this room sees to."""

    def __init__(self, core: Core) -> None:
        self.core = core

    @classmethod
    def is_wanted(cls, settings: Settings) -> bool:
        """Whether the settings ask for this room; one that is not wanted is not built."""
        return True

    # ── the service's life ───────────────────────────────────────────────────────────────────

    def bind(self, host: Host) -> None:
        """Called once, with the service that this is a room of, before it starts."""

    def start(self) -> None:
        """Begin work: called on the event loop, once the service begins to serve."""

    def upkeep(self) -> None:
        """Called every 250 ms or so."""

    def end_hopeless(self, by: float) -> int:
        """End waiting work that will not be done at time ``by``, when the service will be gone.
        Returns how many."""
        return 0

    def end_all(self) -> None:
        """End all live work, because the service shuts down."""

    async def close(self) -> None:
        """Close every connection and thread."""

    # ── what the service asks ────────────────────────────────────────────────────────────────

    @property
    def latest_end(self) -> float:
        """When the latest work with fetchable results ended, in seconds of the clock."""
        return 0.0

    def is_ready(self) -> bool:
        """Whether this room takes work although no instance takes text."""
        return False

    def live(self) -> Iterable[AnyWork]:
        """Work of this room that has not ended."""
        return ()

    def cancel(self, work: AnyWork) -> None:
        """Cancel live work of this room, as asked for through the API. Idempotent (WP-2)."""

    def submit_of(self, job: Job) -> Submit | None:
        """How this room submits a job that is its own; None for any other job."""
        return None

    def charge(self, task: Task) -> None:
        """Called once all of a request is read, and before it is offered. Raises ``TidegateError``
        to refuse it."""

    def standings(self, key: str) -> Iterable[Standing]:
        """Limits of this room that a key is told of with every answer."""
        return ()

    # ── what people are shown ────────────────────────────────────────────────────────────────

    def capabilities(self) -> Mapping[str, object]:
        """Fields to add to ``GET /v2/capabilities``."""
        return {}

    def describe(self, address: str, *, briefly: bool = False) -> Mapping[str, object]:
        """Fields to add to the description of the instance at ``address``; ``briefly``: as the
        overview shows them."""
        return {}

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────

    def edges(self) -> Iterable[ModuleType]:
        """Modules with ``routes()``, and ``OPERATIONS`` that describe them for OpenAPI."""
        return ()

    def attach(self, app: "web.Application") -> None:
        """Put into ``app`` what the handlers of ``edges`` read."""


def build_rooms(core: Core) -> list[Extension]:
    modules = modules_of_rooms("extension")
    kinds = [kind for module in modules for kind in defined_in(module, Extension)]
    return [kind(core) for kind in kinds if kind.is_wanted(core.settings)]
