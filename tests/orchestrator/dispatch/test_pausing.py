"""Running jobs that make room for more urgent work: who, how often, and that nothing leaks."""

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api.http import event_stream
from orchestrator.dispatch.attempt import Attempt
from orchestrator.dispatch.pausing import Pausing
from orchestrator.instances.candidate import Candidate
from orchestrator.instances.concurrency import ConcurrencyLimit, InFlightJob
from orchestrator.instances.instance import InstanceState
from orchestrator.placement.placer import Placer
from orchestrator.tasks.deadline import Parts
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import Stage
from protocol import AbortCause, Outcome, Submit
from tests.orchestrator.api.http.raw import read_to_end, send
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.orchestrator.dispatch.test_retry import EXPECTED, speak, text_of
from tests.orchestrator.placement.test_placement import FakeRegistry, candidate, task
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan

# ── who ──────────────────────────────────────────────────────────────────────────────────────────


class Waiting(list[Task]):
    """A queue in this order."""

    def first(self, most: int) -> list[Task]:
        return self[:most]


class Rig:
    """Instances ``a`` and ``b`` with jobs of stated urgencies. KV blocks are of 16 tokens."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.urgencies: dict[str, float] = {}
        self.running: list[Any] = []
        self.instances = {name: self.instance() for name in "ab"}
        self.able = ["a", "b"]
        registry = SimpleNamespace(instances=self.instances)
        forecaster = SimpleNamespace(urgency=self.urgency, urgency_of_running=self.urgency)
        placer = SimpleNamespace(able=lambda task: self.able)
        self.pausing = Pausing(registry, forecaster, placer, enabled=enabled)
        self.now = 100.0

    @staticmethod
    def instance() -> Any:
        stats = SimpleNamespace(kv_blocks_total=100)
        return SimpleNamespace(
            can_pause=True,
            has_free_slot=False,
            has_waiting=False,
            load=0,
            stats=stats,
            concurrency=ConcurrencyLimit(0),
        )

    def urgency(self, task: Task, now: float) -> Any:
        return SimpleNamespace(log_urgency=self.urgencies[task.id], chance=0.5, work_ms=10.0)

    def task(self, name: str, urgency: float, **changes: object) -> Task:
        made = task(**changes)
        made.id = name
        self.urgencies[name] = urgency
        return made

    def runs(self, name: str, urgency: float, at: str = "a", **changes: object) -> Task:
        made = self.task(name, urgency, **changes)
        made.stage = Stage.RUNNING
        made.attempt = SimpleNamespace(task=made, address=at, is_paused=False, has_slot=True)
        self.running.append(made.attempt)
        return made

    def sent(self, name: str, urgency: float, at: str = "a", **changes: object) -> Task:
        """It waits for a slot inside the worker, which has none, for half a second."""
        made = self.runs(name, urgency, at, **changes)
        made.stage, made.instance = Stage.DISPATCHED, at
        self.running[-1].has_slot = False
        self.running[-1].dispatched_at = self.now + 0.5
        self.instances[at].has_waiting = True
        return made

    def victims(self, *waiting: Task) -> list[str]:
        self.now += 1.0
        queue: Any = Waiting(waiting)
        chosen = self.pausing.victims(queue, self.running, self.now)
        return [swap.running.task.id for swap in chosen]


def test_dl15_only_a_clearly_more_urgent_task_pauses_an_answer() -> None:
    rig = Rig()
    run = rig.runs("r", -1.0)
    run.completion_tokens = 1
    assert rig.victims(rig.task("w", -0.6)) == []  # half as urgent again is not enough
    assert rig.victims(rig.task("w", -0.5)) == ["r"]
    assert rig.victims() == []
    run.completion_tokens = 0
    assert rig.victims(rig.task("w", -0.9)) == ["r"], "without a token it has little to lose"
    assert rig.victims(rig.task("w", -2.0)) == []


def test_dl7_no_pause_is_foreseen_for_what_will_not_be_urgent_enough() -> None:
    rig = Rig()
    newcomer = rig.task("n", -9.0)  # ln(0.5 / 10) = -3.0 once it has no slack left
    assert rig.pausing.may_get_row(newcomer, rig.now)  # nothing is known before the first scan
    for urgency, may in ((-3.2, False), (-3.6, True)):
        rig.running.clear()
        rig.runs("r", urgency)
        rig.victims(rig.task("w", -9.0))
        assert rig.pausing.may_get_row(newcomer, rig.now) is may
    rig.instances["a"].concurrency.fitting, rig.instances["a"].concurrency.best_rows = 8, 4
    rig.urgencies["r"] = -3.2
    rig.victims(rig.task("w", -9.0))
    assert rig.pausing.may_get_row(newcomer, rig.now), "the instance may run more rows"


def test_the_least_urgent_go_first_one_for_each_that_waits() -> None:
    rig = Rig()
    for name, urgency, at in (("r1", -5.0, "a"), ("r2", -9.0, "a"), ("r3", -7.0, "b")):
        rig.runs(name, urgency, at)
    waiting = [rig.task(f"w{i}", 0.0) for i in range(2)]
    assert rig.victims(*waiting) == ["r2", "r3"]
    rig.able = ["b"]
    assert rig.victims(*waiting) == ["r3"]


def test_dl15_a_job_with_ample_time_makes_room_for_any_that_may_be_in_time() -> None:
    rig = Rig()
    run, waiting = rig.runs("r", -1.0), rig.task("w", -0.9)
    left_s = waiting.deadline.at - (rig.now + 1.0)
    run.deadline = replace(run.deadline, at=rig.now + 1.0 + 10.1 * left_s)
    assert rig.victims(waiting) == ["r"]
    rig.urgencies["w"] = -math.inf
    assert rig.victims(waiting) == []


def test_or24_a_tenant_takes_rows_of_its_own_or_of_one_that_has_more() -> None:
    rig = Rig()
    rig.runs("small", -9.0, tenant="small")
    for number in range(2):
        rig.runs(f"large {number}", -5.0 - number, tenant="large")
    assert rig.victims(rig.task("w", 0.0, tenant="large")) == ["large 1"]
    assert rig.victims(rig.task("w", 0.0, tenant="small")) == ["small"]
    assert rig.victims(rig.task("w", 0.0, tenant="new")) == ["large 1"]


def test_surplus_rows_are_paused_the_least_urgent_of_who_has_more_than_a_share() -> None:
    rig = Rig()
    rig.runs("small", -9.0, tenant="small")
    for number in range(4):
        rig.runs(f"large {number}", -1.0 - number, tenant="large")
    a = rig.instances["a"]
    a.load, a.concurrency.fitting, a.concurrency.best_rows = 5, 8, 3
    paused = rig.pausing.surplus(rig.running, rig.now)
    assert [attempt.task.id for attempt in paused] == ["large 3", "large 2"]
    a.concurrency.best_rows = 5
    assert rig.pausing.surplus(rig.running, rig.now) == []


def test_dl19_what_waits_inside_a_worker_is_made_room_for() -> None:
    rig = Rig()
    for name, urgency, at in (("r1", -5.0, "a"), ("r2", -6.0, "a"), ("r3", -9.0, "b")):
        rig.runs(name, urgency, at)
    rig.sent("w", -4.5)
    assert rig.victims() == ["r2"], "where it is, though another one is less urgent"
    nobody: Any = Waiting()
    assert rig.pausing.make_room(nobody, rig.running, rig.now).left == []  # scanned just now


def test_dl19_one_pause_for_each_that_waits_inside_and_the_most_urgent_first() -> None:
    rig = Rig()
    for i in range(4):
        rig.runs(f"r{i}", -9.0 - i)
    rig.sent("w1", -1.0)
    rig.sent("w2", 0.0)
    clearing = rig.instances["a"].concurrency
    assert rig.victims() == ["r3", "r2"]
    clearing.pause(InFlightJob(1, 1, 1, False))  # for the most urgent of them
    assert rig.victims() == ["r3"]
    clearing.pause(InFlightJob(1, 1, 1, False))
    assert rig.victims() == []
    clearing.got_slot()  # by somebody else, it seems
    assert rig.victims() == ["r3"]


def test_what_is_paused_before_its_first_token_does_not_wait_inside_its_worker() -> None:
    """It waits in the queue: from both places it would be queued twice."""
    rig = Rig()
    rig.runs("r", -9.0)
    w = rig.sent("w", -1.0)
    assert rig.victims() == ["r"]
    rig.running[-1].is_paused = True
    assert rig.victims() == []
    assert rig.victims(w) == ["r"]


def test_nobody_is_paused_for_what_was_sent_a_moment_ago_or_holds_less_than_it_needs() -> None:
    rig = Rig()
    rig.runs("r", -9.0).completion_tokens = 1
    rig.sent("w", 0.0)
    rig.running[-1].dispatched_at += 0.5
    assert rig.victims() == []
    concurrency = rig.instances["a"].concurrency
    concurrency.add(InFlightJob(1, 1, 100, False), 0)  # that of the one that waits is counted
    assert rig.victims() == ["r"]
    concurrency.add(InFlightJob(1, 1, 1, False), 0)
    assert rig.victims() == []


def test_work_without_a_chance_pauses_nobody() -> None:
    rig = Rig()
    rig.runs("r", -50.0)
    waiting = rig.task("w", 0.0)
    waiting.is_background = True
    assert rig.victims(waiting) == []


@pytest.mark.parametrize("has_left", [False, True])
def test_dl19_a_slot_that_is_kept_after_all_is_cleared_for_nobody(has_left: bool) -> None:
    """Or what waits inside a worker would be taken to have it soon."""
    lane: Any = SimpleNamespace(address="a", pause=lambda _: None, resume=lambda _: None)
    owner: Any = None
    concurrency, job = ConcurrencyLimit(1), InFlightJob(1, 1, 1, is_computing_prompt=False)
    attempt = Attempt(owner, task(), lane, concurrency, job, ManualClock())
    attempt.has_slot = True
    attempt.pause()
    assert concurrency.clearing == 1
    if has_left:
        attempt.on_paused()
    attempt.resume(0)
    if has_left:
        assert concurrency.clearing == 1
        attempt.on_resumed()
    assert concurrency.clearing == 0


def test_dl8_batch_work_pauses_its_like_only() -> None:
    rig = Rig()
    rig.runs("r", -50.0)
    batch = rig.task("w", 0.0, priority=Priority.BATCH)
    assert rig.victims(batch) == []
    rig.runs("b", -20.0, priority=Priority.BATCH)
    assert rig.victims(batch) == ["b"]
    assert rig.victims(rig.task("i", 0.0)) == ["r"]


@pytest.mark.parametrize(
    "why",
    [
        *("paused", "left", "not begun", "promised", "paced"),
        *("cannot", "gone", "off"),
    ],
)
def test_who_is_never_paused(why: str) -> None:
    rig = Rig(enabled=why != "off")
    run = rig.runs("r", -50.0)
    match why:
        case "paused":
            rig.running[0].is_paused = True
        case "left":
            run.attempt = SimpleNamespace()
        case "not begun":
            rig.running[0].has_slot = False
        case "promised":
            run.is_promised = True
        case "paced":  # DL-14: its next token is due soon
            run.completion_tokens, run.parts = 1, Parts(token_gap_s=0.025)
        case "cannot":
            rig.instances["a"].can_pause = False
        case "gone":
            del rig.instances["a"]
    assert rig.victims(rig.task("w", 0.0)) == []


def test_wk4_nobody_is_paused_for_work_that_memory_does_not_hold() -> None:
    """A task of 74 tokens takes 5 blocks of the hundred. A job without a token is taken back."""
    rig = Rig()
    run = rig.runs("r", -50.0)
    run.completion_tokens = 1
    concurrency, waiting = rig.instances["a"].concurrency, rig.task("w", 0.0)

    def holds(*blocks: int) -> list[InFlightJob]:
        jobs = [InFlightJob(1, 1, count, False) for count in blocks]
        for job in jobs:
            concurrency.add(job, 0)
        return jobs

    (first,) = holds(95)
    assert rig.victims(waiting) == ["r"]
    (second,) = holds(1)
    assert rig.victims(waiting) == []
    run.completion_tokens = 0
    assert rig.victims(waiting) == ["r"]
    run.completion_tokens = 1
    concurrency.remove(second)
    concurrency.pause(first)  # most of the memory is for those that pause already
    assert rig.victims(waiting) == []
    waiting.paused_on = "a"  # whose KV is there needs no more
    assert rig.victims(waiting) == ["r"]


def test_a_job_with_tokens_is_paused_whatever_was_paused_just_before_it() -> None:
    """Only a job without a token can be taken back."""
    rig = Rig()
    concurrency = rig.instances["a"].concurrency
    for name, blocks in (("r1", 40), ("r2", 51)):
        rig.runs(name, -9.0).completion_tokens = 1
        concurrency.add(job := InFlightJob(1, 1, blocks, False), 0)
        rig.running[-1].pause = partial(lambda job, **_: concurrency.pause(job), job)
    waiting: Any = Waiting(rig.task(f"w{i}", 0.0) for i in range(2))
    left = rig.pausing.make_room(waiting, rig.running, rig.now).left
    assert [task.paused_on for task in left] == ["a", "a"]


def test_a_paused_task_goes_on_only_where_its_kv_is() -> None:
    registry = FakeRegistry(candidate("a", max_running=8), candidate("b", max_running=8))
    chooser = Placer(registry, ManualClock(), lambda task: 10)

    def goes(**changes: object) -> str | None:
        registry.now["a"] = candidate("a", max_running=8, **changes)
        chooser.refresh()
        choice = chooser.choose(paused)
        assert (choice is not None) == chooser.has_room_for(chooser.requirements(paused))
        return None if choice is None else choice.name

    paused = task()
    paused.paused_on = "a"
    assert goes() == "a"
    assert goes(load=7, limit=2) == "a"  # no memory for others, but its own is there
    assert goes(load=8, limit=9) == "a"  # before those that would wait in the worker
    assert goes(load=9, limit=9) is None
    assert goes(ready=False) == "a"  # takes nothing new, and lets run what it has
    assert goes(ready=False, is_up=False) is None
    fresh = Candidate("a", "m", b"v", True, 2, 7, max_running=8)
    registry.now = {"a": fresh}
    chooser.refresh()
    assert chooser.choose(task()) is None
    assert chooser.has_room and not chooser.could_start(task())


# ── over real sockets ────────────────────────────────────────────────────────────────────────────

LONG = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "deadline_ms": 60_000}
URGENT = {"prompt": "now", "max_tokens": 5, "deadline_ms": 10_000}


class Scene:
    """One slot for a long job, which an urgent one takes over, until ``hurry`` is set."""

    def __init__(self, service: Service, workers: list[FakeWorker], at: int) -> None:
        self.service = service
        self.workers = workers
        self.go_on, self.hurry = asyncio.Event(), asyncio.Event()
        self._at = at
        for worker in workers:
            worker.plan = self.plan
        self.worker = workers[0]

    def plan(self, submit: Submit) -> Plan:
        if submit.sampling.max_tokens == URGENT["max_tokens"]:
            return Plan(stall_at=0, release=self.hurry)
        return Plan(stall_at=self._at, release=self.go_on, speak=speak)

    async def submit(self, body: dict[str, object]) -> str:
        told: dict[str, str] = await self.service.ask("POST", "/v2/tasks", 202, json=body)
        return told["task_id"]

    async def status(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = await self.service.ask("GET", f"/v2/tasks/{name}")
        return answer

    async def begin(self, **changes: object) -> tuple[str, str]:
        """The long job is paused for the urgent one; their names."""
        long = await self.submit(LONG | changes)
        task = self.service.orchestrator.store.get(long)
        await self.service.until(
            lambda: task.stage is Stage.RUNNING and task.completion_tokens == self._at
        )
        self.worker = next(w for w in self.workers if w.address == task.instance)
        urgent = await self.submit(
            URGENT | {"placement": {"mode": "pin", "instances": [task.instance]}}
        )
        await self.worker.until(lambda: len(self.worker.pauses) == 1)
        await self.worker.until(lambda: self.worker.running == 2)
        return long, urgent

    def holds(self) -> tuple[int, int, int]:
        """What waits, what pauses, and what is under way."""
        orchestrator = self.service.orchestrator
        limits = [instance.concurrency for instance in orchestrator.registry]
        for concurrency in limits:
            concurrency.check_integrity()
        orchestrator.queue.check_integrity()
        loads = sum(instance.load for instance in orchestrator.registry)
        return len(orchestrator.queue), sum(concurrency.paused for concurrency in limits), loads

    async def ends(self, *outcomes: str) -> None:
        """With these outcomes and with nothing left anywhere."""
        self.hurry.set()
        self.go_on.set()
        await self.service.until(
            lambda: (
                sorted(self.service.outcomes()) == sorted(outcomes) and self.holds() == (0, 0, 0)
            )
        )
        for worker in self.workers:
            await worker.until(lambda w=worker: w.running == 0)  # type: ignore[misc]
        attempts = self.service.orchestrator.stages.dispatcher._in_flight
        assert not attempts and not self.service.orchestrator.live_tasks


MakeScene = Callable[..., Awaitable[Scene]]


@pytest.fixture
def scene(make_worker: MakeWorker, make_service: MakeService) -> MakeScene:
    async def make(*, count: int = 1, at: int = 3) -> Scene:
        """``at``: the tokens that the long job has when it is paused."""
        workers = [await make_worker(max_running=1, can_pause=True) for _ in range(count)]
        return Scene(await make_service(*workers, MOST_BACKLOG=0), workers, at)

    return make


async def test_a_paused_job_goes_on_where_it_stopped(scene: MakeScene) -> None:
    """OR-1, DL-15: no token lost or repeated, and the client is told nothing of it."""
    stage = await scene()
    long, urgent = await stage.begin()
    assert stage.holds() == (1, 1, 1)
    stage.hurry.set()
    await stage.worker.until(lambda: len(stage.worker.resumes) == 1)
    stage.go_on.set()
    events = await stage.service.follow(f"/v2/tasks/{long}/events")
    assert text_of(events) == EXPECTED
    assert [e.event for e in events].count("started") == 1
    await stage.ends("met", "met")
    assert [record.task_id for record in stage.service.ends] == [urgent, long]
    assert len(stage.worker.submits) == 2
    assert len(stage.worker.pauses) == len(stage.worker.resumes) == 1


async def test_or2_the_place_of_a_paused_task_is_told(scene: MakeScene) -> None:
    stage = await scene()
    long, _ = await stage.begin()
    first = await stage.status(long)
    assert (first["status"], first["queue_position"]) == ("running", 0)
    assert first["usage"]["completion_tokens"] == 3
    assert stage.service.metric("tidegate_queue_depth") == 1
    await stage.submit(URGENT | {"deadline_ms": 9_000})
    await stage.service.until(lambda: len(stage.service.orchestrator.queue) == 2)
    assert (await stage.status(long))["queue_position"] == 1
    await stage.ends("met", "met", "met")


@pytest.mark.parametrize("at", [0, 3])
async def test_or10_a_paused_task_of_a_lost_instance_goes_on_elsewhere(
    scene: MakeScene, at: int
) -> None:
    stage = await scene(count=2, at=at)
    long, _ = await stage.begin()
    stage.go_on.set()
    stage.hurry.set()
    await stage.worker.stop()
    assert text_of(await stage.service.follow(f"/v2/tasks/{long}/events")) == EXPECTED
    await stage.service.until(lambda: len(stage.service.outcomes()) == 2)
    # The other one was pinned to what is gone.
    assert stage.service.outcomes().count("met") >= 1
    await stage.service.until(lambda: stage.holds()[:2] == (0, 0))


async def test_or10_a_paused_task_of_a_silent_instance_goes_elsewhere_once(
    scene: MakeScene,
) -> None:
    """It waits already: it must not come into the queue a second time."""
    stage = await scene(count=2, at=0)
    long, _ = await stage.begin()
    stage.go_on.set()
    registry = stage.service.orchestrator.registry
    registry.instances[stage.worker.address].state = InstanceState.SUSPECT
    stage.service.orchestrator.stages.dispatcher.upkeep()
    assert text_of(await stage.service.follow(f"/v2/tasks/{long}/events")) == EXPECTED
    await stage.ends("met", "met")


async def test_dl19_what_waits_inside_a_worker_is_taken_back_for_a_slot_elsewhere(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """Nobody on its own instance may be paused for it: they are as urgent."""
    workers = [await make_worker(max_running=16, can_pause=True) for _ in range(2)]
    service = await make_service(*workers)
    stage = Scene(service, workers, 3)
    pressed, patient = workers

    async def fill(worker: FakeWorker, count: int, **changes: object) -> None:
        pinned = {"placement": {"mode": "pin", "instances": [worker.address]}}
        for _ in range(count):
            await stage.submit(LONG | pinned | changes)
        await worker.until(lambda: worker.running == count)

    await fill(patient, 17, priority="batch")
    await fill(pressed, 16, deadline_ms=9_000)
    held = asyncio.Event()
    plans = pressed.plan
    pressed.plan = lambda submit: (
        Plan(begin=held) if submit.sampling.max_tokens == URGENT["max_tokens"] else plans(submit)
    )
    urgent = await stage.submit(URGENT)
    task = service.orchestrator.store.get(urgent)
    assert task.instance == pressed.address
    stage.hurry.set()
    await service.until(lambda: task.ending is not None)
    assert task.instance == patient.address and task.ending.outcome is Outcome.MET
    assert len(patient.pauses) == 1 and not pressed.pauses and len(pressed.cancels) == 1
    held.set()
    await stage.ends(*["met"] * 34)


# ── for whom nobody reads ────────────────────────────────────────────────────────────────────────

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "deadline_ms": 60_000}
MANY, FEW = 100, 5
"""Tokens of the long answer, of 8 kB each, and of the short ones."""


class Reading:
    """One slot; a long answer in it, whose client reads or does not, and others that come."""

    def __init__(self, service: Service, worker: FakeWorker) -> None:
        self.service = service
        self.worker = worker
        self.long = Plan(
            tokens=MANY, stall_at=60, per_delta=5, text=lambda index: f"{index:06}" + "x" * 8000
        )
        worker.plan = lambda submit: self.long if submit.sampling.max_tokens == MANY else Plan()

    async def begin(self, **changes: object) -> tuple[socket.socket, Task]:
        """Ask for the long answer; none of it is read yet."""
        body = CHAT | {"max_tokens": MANY, "stream": True} | changes
        client = await send(self.service, body, receive_buffer=4096)
        await self.service.until(lambda: bool(self.service.orchestrator._live))
        (task,) = self.service.orchestrator._live
        await self.service.until(lambda: task.completion_tokens == 60)
        return client, task

    async def good(self, **changes: object) -> None:
        await self.service.ask(
            "POST", "/v1/chat/completions", json=CHAT | {"max_tokens": FEW} | changes
        )


@pytest.fixture
def soon_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read for some hundredths of a second may be paused."""
    monkeypatch.setattr(event_stream, "PAUSE_AFTER_S", 0.05)


@pytest.fixture
async def reading(make_worker: MakeWorker, make_service: MakeService, soon_behind: None) -> Reading:
    worker = await make_worker(max_running=1, can_pause=True)
    service = await make_service(worker, MOST_BACKLOG=0)
    return Reading(service, worker)


@pytest.mark.parametrize("priority", ["interactive", "batch"])
async def test_or11_who_does_not_read_makes_room_and_goes_on_when_it_reads(
    reading: Reading, priority: str
) -> None:
    client, task = await reading.begin()
    await reading.service.until(lambda: task.is_unread)
    assert not reading.worker.pauses  # nobody else wants the slot
    for _ in range(3):
        await reading.good(priority=priority)
    assert len(reading.worker.pauses) == 1
    await asyncio.sleep(0.1)  # the slot is free, but what for?
    assert not reading.worker.resumes
    reading.long.release.set()
    data = await read_to_end(client)
    client.close()
    assert data.count(b"data: ") == MANY + 3 and data.count(b"x" * 8000) >= MANY - 20
    assert len(reading.worker.resumes) == 1
    await reading.service.until(lambda: reading.service.outcomes() == ["met"] * 4)


@pytest.mark.parametrize("on_disconnect", ["cancel", "continue"])
async def test_or11_who_reads_keeps_its_slot(reading: Reading, on_disconnect: str) -> None:
    """And work that goes on without a client needs no reader."""
    client, task = await reading.begin(on_disconnect=on_disconnect)
    if on_disconnect == "cancel":
        await reading.service.until(lambda: task.is_unread)
        loop, data = asyncio.get_running_loop(), bytearray()
        while task.is_unread or data.count(b'"content":"0') < 60:
            data += await loop.sock_recv(client, 1 << 16)
    other = asyncio.create_task(reading.good())
    await reading.service.until(lambda: len(reading.service.orchestrator.queue) == 1)
    await asyncio.sleep(0.1)
    assert not task.is_unread and not reading.worker.pauses
    reading.long.release.set()
    await read_to_end(client)
    client.close()
    await other


@pytest.mark.usefixtures("soon_behind")
@pytest.mark.parametrize("gone", [True, False])
async def test_or11_who_never_reads_on_loses_its_place(
    make_worker: MakeWorker, make_service: MakeService, gone: bool
) -> None:
    """Paused or not, within the time that a slow client has; and at once when it goes."""
    worker = await make_worker(max_running=1, can_pause=True)
    service = await make_service(worker, MOST_BACKLOG=0, CLIENT_TIMEOUT_S=60.0 if gone else 0.4)
    reading = Reading(service, worker)
    client, task = await reading.begin()
    await service.until(lambda: task.is_unread)
    await reading.good()
    if gone:
        client.close()
    await service.until(lambda: sorted(service.outcomes()) == ["aborted", "met"])
    await worker.until(lambda: not worker.running)
    await service.until(lambda: not any(i.load for i in service.orchestrator.registry))
    assert [cancel.cause for cancel in worker.cancels] == [AbortCause.DISCONNECT]
    client.close()
