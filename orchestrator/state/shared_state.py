"""One orchestrator's membership in a shared state: it joins at startup and leaves at shutdown."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from orchestrator.admission.rate_limits import Limiter
from orchestrator.errors import NotReady
from orchestrator.ids import digits_of, tag_of
from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.sharing import Lines, Sharing, Shelf, Sums
from orchestrator.state import connection, scripts
from orchestrator.state.connection import StateConfig
from orchestrator.state.exchange import KEEP_S, Cordons, SharedRuns, SharedSums
from orchestrator.state.items import SharedItems
from orchestrator.state.limits import SharedLimits
from orchestrator.state.members import Holder, Members
from orchestrator.state.shares import SlotShares
from orchestrator.state.takeover import Takeover
from orchestrator.state.tasks import SharedTasks
from orchestrator.tasks.journal.file import JournalFile
from orchestrator.tasks.journal.records import UnfinishedTask
from orchestrator.tasks.journal.store import JournalStore
from orchestrator.tasks.runs import Runs
from orchestrator.tasks.task import Task
from orchestrator.telemetry.metrics import MetricRow, Metrics

LINES_AT_A_TIME = 256
_OWNER_UNKNOWN = "the store does not answer, so the owner of this is unknown: retry in a moment"


class SharedState(Sharing):
    """The parts of the shared state, and a lookup of the owners of items."""

    is_shared = True

    def __init__(
        self,
        config: StateConfig,
        tag: str,
        unix: Callable[[], float],
        host: str,
        advertise: str | None,
    ) -> None:
        """``host`` is where this process listens. ``advertise`` is the address for the other
        orchestrators; None: the listening address."""
        self.config = config
        self.tag = tag
        self._advertise = advertise
        self._host = host
        self.tasks = SharedTasks(config, tag)
        self.members = Members(config, self.tasks, unix)
        self.items = SharedItems(self.members)
        self.forwarded = 0
        self._takeover: Takeover | None = None

    @property
    def taken(self) -> int:
        return 0 if self._takeover is None else self._takeover.taken

    @property
    def fault(self) -> str:
        return self.members.fault

    def store(self, file: JournalFile | None) -> JournalStore | None:
        return self.tasks.store()

    def share(self, registry: Registry, queue: TaskQueue[Task], limiter: Limiter) -> None:
        self.limits = SharedLimits(self.members, limiter)
        SlotShares(self.members, registry, queue)
        self._cordons = Cordons(self.members, registry)

    def follow(self, runs: Runs, metrics: Metrics) -> None:
        SharedRuns(self.members, runs)
        metrics.watch(self, STATE)

    def keep(self, kind: str, shelf: Shelf) -> None:
        self.items.add(kind, shelf)

    def add_up(self, sums: Sums) -> None:
        SharedSums(self.members, sums)

    async def write_lines(self, lines: Lines) -> None:
        """Write lines; their pages are kept for ``KEEP_S`` after their last change."""
        stem, keep_ms = self.members.names.page(""), round(1000 * KEEP_S)
        left = iter(lines.items())
        with self._ready():
            while some := list(islice(left, LINES_AT_A_TIME)):
                stated = [part for where, numbers in some for part in (*where, numbers)]
                await self.members.client.eval(scripts.WRITE_LINES, 0, stem, keep_ms, *stated)

    async def read_lines(self, page: str) -> Mapping[str, bytes]:
        """Read a page in steps, so that the store can serve other clients."""
        name = self.members.names.page(page)
        with self._ready():
            scan = self.members.client.hscan_iter(name, count=LINES_AT_A_TIME)
            return {name.decode(): numbers async for name, numbers in scan}

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Raises ``NotReady`` if the store is unavailable or may not be used yet."""
        if self.members.fault or not self.members.has_renewed:
            raise NotReady(self.members.fault or "the store has not answered yet")
        try:
            yield
        except connection.FAILURES as error:
            raise NotReady(connection.describe_error(error)) from error

    async def take(self, task: Task) -> None:
        await self.limits.take(task)

    async def cordoned(self, address: str, grace_s: float) -> None:
        await self._cordons.cordoned(address, grace_s)

    async def uncordoned(self, address: str) -> None:
        await self._cordons.uncordoned(address)

    def on_lapsed(self, call: Callable[[], None]) -> None:
        self.members.on_lapsed.append(call)

    def describe(self) -> dict[str, object] | None:
        """The fields of ``/health``."""
        return {
            "members": self.members.alive,
            "fault": self.members.fault or None,
            "strangers": self.members.strangers,
        }

    def join(
        self,
        port: int,
        keys: str,
        take_on: Callable[[Sequence[UnfinishedTask]], None],
        may_take: Callable[[], bool],
    ) -> None:
        self._takeover = Takeover(self.members, self.tasks, take_on, may_take)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.members.start(self._advertise or f"http://{host}:{port}", keys)

    async def close(self) -> None:
        if self._takeover is not None:
            self._takeover.close()
        await self.items.close()
        await self.members.leave()

    async def holder_of(self, item_id: str) -> Holder | None:
        """The orchestrator that has an id; this one if it has just claimed it, or has it for
        another key. None if there is none. Raises ``NotReady`` before a takeover or while the store
        is unavailable, and the errors of ``SharedItems.claim``."""
        tag, digits = tag_of(item_id), digits_of(item_id)
        if not tag:
            return None
        try:
            if self.members.fault:  # each look would wait for the store
                raise connection.StateError
            async with self.members.client.pipeline(transaction=False) as pipe:
                pipe.hmget(self.tasks.names.task(digits), ["owner", "end"])
                pipe.hget(self.tasks.names.item(digits), "owner")
                (owner, end), kept_by = await pipe.execute()
        except connection.FAILURES:  # the orchestrator that made it may still have it
            made_by = await self._reached(tag)
            if made_by is None:
                raise NotReady(_OWNER_UNKNOWN) from None
            return made_by
        if kept_by is not None:
            return await self._reached(kept_by.decode()) or await self._claimed(digits)
        owner = None if owner is None else owner.decode()
        if owner == self.tasks.tag and digits in self.tasks.known_ids():
            return Holder(self.members.me.url, self.tasks.tag)
        holder = await self._reached(owner or tag)
        if holder is None and end is not None:  # it ended: all orchestrators can read it
            return Holder(self.members.me.url, self.tasks.tag)
        if holder is None and owner is not None:
            raise NotReady(
                "the orchestrator that has this task is gone, and another one takes it over: retry "
                "in a moment"
            )
        return holder

    async def is_living(self, item_id: str) -> bool:
        """Whether a durable task with that id is not here and has not ended. Raises ``NotReady`` if
        the store is unavailable."""
        if not (digits := digits_of(item_id)):
            return False
        try:
            task = self.tasks.names.task(digits)
            owner, end = await self.members.client.hmget(task, ["owner", "end"])
        except connection.FAILURES:
            raise NotReady(_OWNER_UNKNOWN) from None
        is_here = owner == self.tasks.tag.encode() and digits in self.tasks.known_ids()
        return owner is not None and end is None and not is_here

    def is_of_dead(self, item_id: str) -> bool:
        """Whether an orchestrator that is known to be dead made the id."""
        tag, members = tag_of(item_id), self.members
        if not tag or tag == self.tasks.tag or members.fault or not members.has_renewed:
            return False
        seen = members.others.get(tag)
        return seen is None or not seen.is_alive

    async def _reached(self, tag: str) -> Holder | None:
        seen = await self.members.find(tag)
        if seen is None or not seen.is_alive or not seen.member.url:
            return None
        return Holder(seen.member.url, tag)

    async def _claimed(self, digits: str) -> Holder | None:
        with suppress(*connection.FAILURES):
            if await self.items.claim(digits):
                return Holder(self.members.me.url, self.tasks.tag)
        return None


STATE: tuple[MetricRow[SharedState], ...] = (
    MetricRow(
        "gauge",
        "state_members",
        "orchestrators",
        "Live orchestrators that share the state, including this one, as far as it knows",
        lambda state: state.members.alive,
    ),
    MetricRow(
        "gauge",
        "state_failing",
        "bool",
        "1 while the shared store is unavailable and this orchestrator continues alone",
        lambda state: bool(state.members.fault),
    ),
    MetricRow(
        "gauge",
        "state_strangers",
        "orchestrators",
        "Orchestrators with the same prefix and different keys",
        lambda state: len(state.members.strangers),
    ),
    MetricRow(
        "counter",
        "state_limits_alone",
        "requests",
        "Requests with only this orchestrator's own limits, because the store did not answer in "
        "time",
        lambda state: state.limits.alone,
    ),
    MetricRow(
        "gauge",
        "state_items_waiting",
        "items",
        "Sessions and responses with changes that are not yet in the store",
        lambda state: state.items.waiting,
    ),
)
