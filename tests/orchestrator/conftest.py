"""A real orchestrator on a real socket, in front of a fake worker on another."""

import asyncio
import json
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import aiohttp
import grpc
import pytest
from aiohttp import web
from blockbuster import blockbuster_ctx
from pydantic import BaseModel

from orchestrator.api.operator.admin import Control
from orchestrator.api.server import AUTH, build_runner
from orchestrator.build import Components, build, keys_of
from orchestrator.instances.provenance import provenance_of
from orchestrator.instances.served_models import ServedModels, _origin
from orchestrator.lanes import reconnector
from orchestrator.prediction.forecaster import Capacity
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.service import Orchestrator
from orchestrator.settings import CONFIG_FILE, Settings, load_settings, whole_settings
from orchestrator.settings.rooms import modules_of_rooms
from orchestrator.sharing import make_sharing
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.file import open_journal
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import Stage
from perf.stack.constants import set_constants
from protocol import ModelCard, Outcome
from tests.support.clock import LeapingClock
from tests.support.fake_worker import FakeWorker, make_card
from tests.support.paces import KNOWN
from tests.support.sse import Event, events_of
from tests.support.steady_loop import hurry
from worker.environment import nested

for _name in ("sharing", "extension"):  # their first use reads folders
    modules_of_rooms(_name)


@pytest.fixture(autouse=True)
def on_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that blocks the event loop fails; lanes that are lost are opened again within some
    hundredths of a second. Tests without a loop are spared what this takes."""
    if request.node.get_closest_marker("asyncio") is None:
        yield
        return
    with blockbuster_ctx() as blockbuster, pytest.MonkeyPatch.context() as patch:
        # The code that drops the last gRPC channel waits for gRPC's own thread.
        blockbuster.functions["threading.Lock.acquire"].can_block_in("threading.py", "join")
        patch.setattr(reconnector, "FIRST_PAUSE_S", 0.01)
        patch.setattr(reconnector, "LONGEST_PAUSE_S", 0.05)
        yield


OPERATORS_KEY = "the-operators-key"
OPERATOR = {"Authorization": f"Bearer {OPERATORS_KEY}"}
"""Headers of an operator's call to a service whose settings name no admin's key."""


def bearer(token: str) -> dict[str, str]:
    """Headers of a client that has the token; none where there is none."""
    return {"Authorization": f"Bearer {token}"} if token else {}


MakeWorker = Callable[..., Awaitable[FakeWorker]]


@pytest.fixture
async def make_worker() -> AsyncIterator[MakeWorker]:
    """Start workers whose cards differ from the usual one; all end with the test."""
    made: list[FakeWorker] = []

    async def make(
        *,
        port: int = 0,
        foreign: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        options: Iterable[tuple[str, int]] = (),
        **card: object,
    ) -> FakeWorker:
        fake = FakeWorker(make_card(**card), port=port)
        fake.foreign = foreign
        fake.credentials = credentials
        fake.options += options
        await fake.start()
        made.append(fake)
        return fake

    yield make
    for fake in made:
        await fake.stop()


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker()


class Ended(NamedTuple):
    """A task that came to its outcome."""

    task_id: str
    outcome: Outcome


def note_ends(parts: Components, ends: list[Ended]) -> None:
    """Add each task that comes to its outcome here to ``ends``."""
    metrics = parts.orchestrator.stages.settler.metrics
    count = metrics.ended

    def ended(task: Task, ending: Ending) -> None:
        ends.append(Ended(task.id, ending.outcome))
        count(task, ending)

    metrics.ended = ended  # type: ignore[method-assign]


@dataclass
class Service:
    """A running orchestrator."""

    parts: Components
    ends: list[Ended]
    url: str
    http: aiohttp.ClientSession
    runner: web.AppRunner = field(repr=False)
    clock: LeapingClock = field(repr=False)
    workers: tuple[FakeWorker, ...] = field(repr=False, default=())

    @property
    def orchestrator(self) -> Orchestrator:
        return self.parts.orchestrator

    async def answer(self, method: str, path: str, **sent: Any) -> tuple[int, Any]:
        """Status and what is answered, decoded where it is JSON."""
        async with self.http.request(method, path, **sent) as response:
            text = (await response.read()).decode(errors="replace")
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if text and is_json else text

    async def ask(self, method: str, path: str, *statuses: int, **sent: Any) -> Any:
        """What is answered, with one of ``statuses``: else 200."""
        status, answer = await self.answer(method, path, **sent)
        assert status in (statuses or (200,)), answer
        return answer

    async def refused(self, status: int, path: str, **sent: Any) -> Any:
        """The error that is answered to a POST."""
        return (await self.ask("POST", path, status, **sent))["error"]

    async def follow(self, url: str, after: str = "") -> list[Event]:
        """All events of a task that come after one, to its end."""
        return await events_of(self.http, url, after)

    async def run(self, body: dict[str, Any]) -> list[Event]:
        """All events of a task."""
        task = await self.ask("POST", "/v2/tasks", 202, json=body)
        return await self.follow(task["events_url"])

    @property
    def journal(self) -> DurableTasks:
        """Of a service that takes durable tasks."""
        durable = self.orchestrator.stages.durable
        assert durable is not None
        return durable

    async def until_ready(self) -> None:
        """Wait until an instance can be used, and each that a worker of texts stands behind: what
        one of several serves is 503 before."""
        awaited = {worker.address for worker in self.workers if worker.serves_texts}
        registry = self.orchestrator.registry
        await self.until(
            lambda: (
                any(one.ready for one in registry)
                and all(one.ready for one in registry if one.address in awaited)
            )
        )

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for something inside the orchestrator; the test's own timeout is the limit."""
        while not done():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.002)

    async def until_tokens(self, count: int, *, tasks: int = 1) -> None:
        """Wait until so many tasks run, and each has got so many tokens or more."""

        def is_there(task: Task) -> bool:
            return task.stage is Stage.RUNNING and task.completion_tokens >= count

        await self.until(lambda: sum(map(is_there, self.orchestrator._live)) >= tasks)

    def leap(self, seconds: float) -> None:
        """Let so much time pass at once, here and for the workers."""
        for clock in (*(worker.clock for worker in self.workers), self.clock):
            clock.leap(seconds)

    def hold_time(self) -> None:
        """Time stands still but for leaps: however long a slow machine takes, nothing gets late."""
        for clock in (*(worker.clock for worker in self.workers), self.clock):
            clock.hold()

    def hold_pace(self) -> None:
        """Instances are of the pace ``KNOWN``, whatever they do."""
        self.parts.forecaster.capacity_of = lambda model: Capacity((KNOWN,), 64, 64, 0.0, 1.0)

    @asynccontextmanager
    async def leaping(self, seconds: float, tokens: int, *, tasks: int = 1) -> AsyncIterator[None]:
        """Let so much time pass while the body waits, once so many tasks have so many tokens."""

        async def leap() -> None:
            await self.until_tokens(tokens, tasks=tasks)
            self.leap(seconds)

        leaping = asyncio.create_task(leap())
        try:
            yield
            await leaping
        finally:
            leaping.cancel()

    def outcomes(self) -> list[str]:
        return [one.outcome.value for one in self.ends]

    def metric(self, name: str, **labels: str) -> float:
        registry = self.orchestrator.metrics.registry
        # This metric alone, where it has a collector: all of them take longer than most tests.
        families = registry.restricted_registry([name]).collect()
        samples = (sample for family in families for sample in family.samples)
        for sample in samples:
            if (sample.name, sample.labels) == (name, labels):
                return sample.value
        return registry.get_sample_value(name, labels) or 0.0


def settings_of(values: dict[str, Any]) -> Settings:
    """As they are stated. A look at the environment and at files takes longer than all else that
    a service is built of, and is spared where nothing is to be seen there."""
    if any(name.startswith("TIDEGATE_") for name in os.environ) or Path(CONFIG_FILE).exists():
        return load_settings(**values)
    kind = whole_settings()
    settings = kind.__new__(kind)
    BaseModel.__init__(settings, **nested(values))
    return settings


HOMES: Final = {
    "ALL_SESSIONS_BYTES": "orchestrator.sessions.store",
    "ATTEMPTS": "orchestrator.dispatch.retry",
    "CLIENT_BUFFER_BYTES": "orchestrator.api.http.event_stream",
    "CLIENT_TIMEOUT_S": "orchestrator.api.http.event_stream",
    "DOWN_AFTER_S": "orchestrator.lanes.config",
    "KEEP_OUTCOMES_S": "orchestrator.tasks.journal.store",
    "KEPT_TASKS": "orchestrator.build",
    "LEASE_S": "orchestrator.state.connection",
    "LINGER_S": "orchestrator.instances.discovery",
    "MAX_COUNT": "orchestrator.admission.images",
    "MAX_PIXELS": "orchestrator.admission.images",
    "MIN_RESIDENCY_S": "orchestrator.loading.demand",
    "MOST_BACKLOG": "orchestrator.instances.concurrency",
    "MOST_WAITING": "clips.dispatch.admission",
    "REFUSAL_SAMPLE": "orchestrator.prediction.feasibility",
    "RETRY_SHARE": "orchestrator.dispatch.retry",
    "RETURN_MARGIN_S": "orchestrator.dispatch.time_limits",
    "SESSION_BYTES": "orchestrator.sessions.store",
    "SESSION_TTL_S": "orchestrator.sessions.store",
    "SUSPECT_AFTER_S": "orchestrator.lanes.config",
    "WINDOW": "orchestrator.batches.section",
}
"""Modules of the constants that tests set."""
MakeService = Callable[..., Awaitable[Service]]
_make_encoder = ServedModels._make
_ENCODERS: deque[PromptEncoder] = deque(maxlen=8)
"""Made for earlier services: to make one takes a quarter of what a service takes in all."""


def encoder_made_before(models: ServedModels, card: ModelCard) -> PromptEncoder:
    """As for a model that is swapped in again."""
    for encoder in _ENCODERS:
        if encoder.reads_as(card) and encoder._special_in_prompts == models._special_in_prompts:
            models._provenance[_origin(card)] = provenance_of(card)
            return encoder.with_card(card)
    _ENCODERS.append(_make_encoder(models, card))
    return _ENCODERS[-1]


@pytest.fixture
async def make_service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeService]:
    """Start orchestrators with any settings, and constants in capitals; all end with the test."""
    monkeypatch.setattr(ServedModels, "_make", encoder_made_before)
    made: list[Service] = []
    undo: list[Callable[[], None]] = []

    async def make(*workers: FakeWorker, wait: bool = True, **changes: object) -> Service:
        values = {
            "port": 0,
            "instances": tuple(worker.address for worker in workers) or ("127.0.0.1:9",),
        }
        constants = {f"{home}.{n}": changes.pop(n) for n, home in HOMES.items() if n in changes}
        undo.append(set_constants(constants))
        settings = await asyncio.to_thread(settings_of, values | changes)
        if "state__url" not in changes:  # else a store's own clock counts the leases
            hurry(3)  # who is waited for is in this process, too
        loop = asyncio.get_running_loop()
        config = settings.journal.config
        clock = LeapingClock(loop)
        rng = random.Random(7 + len(made))
        sharing = await asyncio.to_thread(make_sharing, settings, rng, clock.unix)
        file = None if config is None else await asyncio.to_thread(open_journal, config)
        parts = build(settings, clock, rng, file=file, sharing=sharing)
        ends: list[Ended] = []
        note_ends(parts, ends)
        runner = build_runner(
            parts.orchestrator,
            parts.health,
            parts.discovery,
            parts.api,
            Control(parts.lifecycle, parts.reloader, keys_of),
            shutdown_timeout_s=0.2,
        )
        runner.app[AUTH].let_operate(OPERATORS_KEY)
        parts.reloader.load = lambda: load_settings(**(values | changes))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        parts.lifecycle.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        http = aiohttp.ClientSession(base_url=url)
        service = Service(parts, ends, url, http, runner, clock, workers)
        made.append(service)
        if wait:
            await service.until_ready()
        return service

    yield make
    for service in made:
        await service.http.close()
        await service.parts.lifecycle.drain(0.0)
        await service.parts.lifecycle.close()
        await service.runner.cleanup()
        counted = service.orchestrator.stages.settler.metrics
        came = sum(
            sample.value
            for counter in (counted.offered, counted.recovered)
            for metric in counter.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
        durable = service.orchestrator.stages.durable
        # DL-10: every request ended in exactly one outcome, or is another process's.
        ended = came - (0 if durable is None else durable.left + durable.lost)
        assert len(service.ends) == ended
        assert len({one.task_id for one in service.ends}) == ended
    for restore in reversed(undo):
        restore()


MakeTwo = Callable[..., Awaitable[tuple[Service, FakeWorker, FakeWorker]]]


@pytest.fixture
def make_two(make_worker: MakeWorker, make_service: MakeService) -> MakeTwo:
    """A service and its workers, the one that takes the first task before the other."""

    async def make(
        card: Mapping[str, object] = MappingProxyType({}), **changes: object
    ) -> tuple[Service, FakeWorker, FakeWorker]:
        made = [await make_worker(**card), await make_worker(**card)]
        first, second = sorted(made, key=lambda worker: worker.address)
        return await make_service(first, second, **changes), first, second

    return make


@pytest.fixture
async def service(worker: FakeWorker, make_service: MakeService) -> Service:
    """One orchestrator, ready, in front of ``worker``."""
    return await make_service(worker)
