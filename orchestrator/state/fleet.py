"""One orchestrator as a member of a fleet: joins at the start, leaves at the end."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from orchestrator.admission.rate_limits import Limiter
from orchestrator.errors import NotReady
from orchestrator.ids import digits_of, tag_of
from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state import connection
from orchestrator.state.connection import StateConfig
from orchestrator.state.cordons import Cordons
from orchestrator.state.limits import SharedLimits
from orchestrator.state.members import Members
from orchestrator.state.shares import SlotShares
from orchestrator.state.siblings import Siblings
from orchestrator.state.takeover import Takeover
from orchestrator.state.tasks import SharedTasks
from orchestrator.tasks.journal.records import UnfinishedTask
from orchestrator.tasks.task import Task
from orchestrator.telemetry.metrics import Metrics, Row


class Holder(NamedTuple):
    """An orchestrator that has what somebody asks for: where it is reached, and its tag."""

    url: str
    tag: str


class Fleet:
    """The parts of the shared state, and who has what."""

    def __init__(self, config: StateConfig, tag: str, unix: Callable[[], float]) -> None:
        self.config = config
        self.tasks = SharedTasks(config, tag)
        self.members = Members(config, self.tasks, unix)
        self.forwarded = 0
        """How many requests were handed on to another member."""
        self.cordons: Cordons | None = None
        self.limits: SharedLimits | None = None
        self.siblings: Siblings | None = None
        """The processes that share this one's port; None where the port is its own."""
        self._takeover: Takeover | None = None

    @property
    def taken(self) -> int:
        """How many durable tasks of other processes were taken on."""
        return 0 if self._takeover is None else self._takeover.taken

    def share(self, registry: Registry, queue: TaskQueue[Task], limiter: Limiter) -> None:
        """Share the instances' slots and cordons, and keys' limits, with the others from the start
        on."""
        self.limits = SharedLimits(self.members, self.tasks.names, self.tasks.tag, limiter)
        SlotShares(self.members, self.tasks.tag, registry, queue)
        self.cordons = Cordons(self.members, self.tasks.names.cordons, registry)

    def watch(self, metrics: Metrics) -> None:
        """Publish the fleet's metrics."""
        metrics.watch(self, FLEET)

    def start(
        self,
        url: str,
        keys: str,
        take_on: Callable[[Sequence[UnfinishedTask]], None],
        may_take: Callable[[], bool],
    ) -> None:
        """Join under ``url``; ``take_on`` is given tasks of others whose end this process has to
        bring about, whenever it ``may_take`` any. ``keys`` is a digest of the keys that are taken
        here."""
        self._takeover = Takeover(self.members, self.tasks, take_on, may_take)
        self.members.start(url, keys)

    async def close(self) -> None:
        """Leave. To be called once everything is written: others take on what is left."""
        if self._takeover is not None:
            self._takeover.close()
        await self.members.leave()

    def share_port(self, group: str, name: str) -> None:
        """Be one of several processes at a port (``Siblings``)."""
        self.siblings = Siblings(self.members, group, name)

    def is_of_member(self, item_id: str) -> bool:
        """Whether an id was made by an orchestrator of the fleet that is known here."""
        tag = tag_of(item_id)
        return tag == self.tasks.tag or tag in self.members.others

    async def holder_of(self, item_id: str) -> Holder | None:
        """The orchestrator that has what goes by an id; None if that is nobody, or this one. Raises
        ``NotReady`` where it is about to be taken on by another."""
        tag, task_id = tag_of(item_id), digits_of(item_id)
        if not tag:
            return None
        owner: Any = None
        end: Any = None
        with suppress(*connection.FAILURES):  # else whoever made it may have it still
            owner, end = await self.members.client.hmget(
                self.tasks.names.task(task_id), ["owner", "end"]
            )
        if end is not None:
            return None  # whoever is asked finds it in the store
        holder = tag if owner is None else owner.decode()
        seen = self.members.others.get(holder)
        if seen is not None and seen.is_alive:
            return Holder(seen.member.url, holder)
        if owner is not None:
            raise NotReady(
                "the orchestrator that has this task is gone, and another one takes it on: ask "
                "again in a moment"
            )
        return None


FLEET: tuple[Row[Fleet], ...] = (
    Row(
        "gauge",
        "fleet_members",
        "orchestrators",
        "Orchestrators that share the state and are alive, with this one, as far as it knows",
        lambda fleet: fleet.members.alive,
    ),
    Row(
        "gauge",
        "fleet_failing",
        "bool",
        "1 while the shared store cannot be used, and this orchestrator goes on alone",
        lambda fleet: bool(fleet.members.fault),
    ),
    Row(
        "counter",
        "fleet_taken",
        "tasks",
        "Durable tasks of other orchestrators that were taken on here",
        lambda fleet: fleet.taken,
    ),
    Row(
        "counter",
        "fleet_forwarded",
        "requests",
        "Requests that were handed on to the orchestrator that has what they ask for",
        lambda fleet: fleet.forwarded,
    ),
)
