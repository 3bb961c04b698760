"""WK-4: limits on memory, and steps that do not fit into it."""

import logging
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol import AbortCause, Code, FinishReason, Sampling
from tests.support.cases import for_each
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import Bench, end_of, ids_of
from tests.support.worker_constants import constants_among
from tests.worker.engine.test_torch_engine import run
from worker.core import Job, JobFinished
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.errors import DeviceLost, MemoryLimitExceeded
from worker.memory import GIB, MemoryLimits
from worker.models.config import read_config
from worker.models.model import load_model
from worker.runner import build
from worker.runner.memory import ProcessMemory, is_out_of_memory, text_guard
from worker.runner.out_of_memory import StepMemory
from worker.scheduler.plan import Plan
from worker.settings import KvSettings, MemorySettings, WorkerSettings


@dataclass
class FakeMeter:
    used: int = 0
    free: int = 2**63
    cached: int = 0
    drops: int = 0

    def used_bytes(self) -> int:
        return self.used + self.cached

    def free_bytes(self) -> int:
        return self.free

    def drop_caches(self) -> None:
        self.cached = 0
        self.drops += 1


@dataclass
class Room:
    """A device on which a step of more than ``tokens`` tokens does not fit."""

    tokens: int
    error: Exception = field(default_factory=lambda: torch.OutOfMemoryError("CUDA out of memory"))
    tried: list[int] = field(default_factory=list)

    def __call__(self, plan: Plan) -> None:
        assert plan.tokens == sum(row.count for row in plan.rows)
        assert all(row.count == 1 and row.samples for row in plan.rows[: plan.decodes])
        self.tried.append(plan.tokens)
        if plan.tokens > self.tokens:
            raise self.error


# ── limits ───────────────────────────────────────────────────────────────────────────────────


def test_the_soft_limit_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    meter = FakeMeter(used=3 * GIB)
    guard = text_guard(meter, MemoryLimits.of(3.1))
    guard.check()
    guard.check()
    (record,) = caplog.records
    assert "3.00 GiB" in record.message and "2.97" in record.message


def test_the_hard_limit_is_a_typed_error_once_caches_are_dropped() -> None:
    meter = FakeMeter(used=3 * GIB, cached=2 * GIB)
    guard = text_guard(meter, MemoryLimits.of(4))
    guard.check()
    assert meter.drops == 1
    with pytest.raises(MemoryLimitExceeded, match=r"hard limit .* 4\.50 GiB of 4\.00 in use"):
        guard.check(ahead_bytes=3 * GIB // 2)
    assert issubclass(MemoryLimitExceeded, MemoryError)


def test_the_process_meter_sees_what_is_touched() -> None:
    meter = ProcessMemory()
    before = meter.used_bytes()
    # Not the heap's: what an earlier test has freed there may be in use still for the system.
    pages = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept = np.frombuffer(pages, np.uint8)
    kept[:] = 1
    assert 48 * 2**20 < meter.used_bytes() - before < 96 * 2**20
    assert kept[-1] == 1
    assert meter.free_bytes() > 0
    meter.drop_caches()


@for_each(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryLimitExceeded("x"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("allocate memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


# ── steps ────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_that_does_not_fit_at_once_is_computed_in_parts() -> None:
    """Nobody fails, and the next steps ask for no more than what fitted."""
    bench = Bench()
    bench.runner.during = room = Room(5)
    jobs = [bench.submit(prompt=3), bench.submit(prompt=30), bench.submit(prompt=8)]
    events = bench.finish()
    assert all(ids_of(job, events) == [7] * 8 for job in jobs)
    assert sum(tokens > 5 for tokens in room.tried) <= 4
    assert bench.is_clean


@for_each("error", [MemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_decodes_that_do_not_fit_together_are_computed_apart(error: Exception) -> None:
    bench = Bench()
    jobs = [bench.submit(prompt=1) for _ in range(4)]
    bench.step()
    bench.runner.during = Room(1, error)
    events = bench.finish()
    assert all(end_of(job, events).reason is FinishReason.LENGTH for job in jobs)
    assert bench.is_clean


def test_only_the_request_that_cannot_be_computed_fails(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    jobs = [bench.submit(prompt=4 + i) for i in range(4)]
    events = bench.step(2)

    def during(plan: Plan) -> None:
        if any(row.request.job is jobs[2] for row in plan.rows):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    bench.runner.during = during
    events += bench.finish()
    end = end_of(jobs[2], events)
    assert (end.reason, end.code) == (FinishReason.ERROR, Code.NO_CAPACITY)
    assert "ran out of memory" in end.message and "2 GiB" in end.message
    others = [job for job in jobs if job is not jobs[2]]
    assert all(ids_of(job, events) == [7] * 8 for job in others)
    assert any("out of memory" in record.message for record in caplog.records)
    assert bench.is_clean
    bench.runner.during = lambda plan: None
    after = bench.submit()
    assert end_of(after, bench.finish()).completion_tokens == 8


def test_a_device_without_room_for_anybody_is_lost_and_no_request_is_blamed() -> None:
    bench = Bench(max_running=32, max_waiting=32, max_step_tokens=64)
    for _ in range(20):
        bench.submit(prompt=1)
    bench.step()
    bench.runner.during = room = Room(0)
    with pytest.raises(DeviceLost, match=r"in a row found no memory .*CUDA out of memory"):
        while True:
            assert not any(isinstance(event, JobFinished) for event in bench.step())
    assert room.tried.count(1) == 8, "not each of the twenty is tried"


def test_requests_that_come_one_by_one_show_it_as_well_unless_another_has_room() -> None:
    bench = Bench()
    bench.runner.during = full = Room(0)
    for _ in range(3):
        for _ in range(2):
            job = bench.submit(prompt=1)
            assert end_of(job, bench.finish()).code is Code.NO_CAPACITY, "elsewhere there may be"
        bench.runner.during = lambda plan: None
        bench.submit(prompt=1)
        bench.finish()
        bench.runner.during = full
    for _ in range(2):
        bench.submit(prompt=1)
        bench.finish()
    bench.submit(prompt=1)
    with pytest.raises(DeviceLost, match="3 requests in a row"):
        bench.finish()


def test_a_request_that_is_cancelled_before_it_is_given_up_ends_once() -> None:
    bench = Bench()
    large, other = bench.submit(prompt=1), bench.submit(prompt=1)
    bench.step()
    room = Room(0)
    bench.runner.during = lambda plan: (
        room(plan) if any(row.request.job is large for row in plan.rows) else None
    )
    while not bench.engine.executor._memory.too_large:
        bench.step()
    bench.engine.cancel(large, AbortCause.CANCEL)
    events = bench.finish()
    assert end_of(large, events).code is Code.CANCELLED
    assert end_of(other, events).code is None and bench.is_clean


def test_a_lack_that_passes_costs_nobody_anything() -> None:
    """Not even a step's size."""
    bench = Bench()
    room = Room(1)
    bench.runner.during = lambda plan: room(plan) if len(bench.runner.plans) == 1 else None
    job = bench.submit(prompt=10)
    assert ids_of(job, bench.finish()) == [7] * 8
    assert [plan.tokens for plan in bench.runner.plans[:3]] == [10, 10, 1]


def test_larger_steps_are_tried_again_later() -> None:
    bench = Bench(prefix_cache=False)
    bench.runner.during = Room(4)
    bench.submit(prompt=16)
    bench.finish()
    bench.runner.during = room = Room(1000)
    for _ in range(20):
        bench.submit(prompt=16)
        bench.finish()
    assert max(room.tried[:4]) <= 8
    assert max(room.tried[-20:]) == 16


def test_a_hard_limit_costs_the_longest_request_and_no_other() -> None:
    meter = FakeMeter(used=1)
    bench = Bench()
    limits = MemoryLimits(hard_bytes=10)
    bench.engine.executor._memory = StepMemory(text_guard(meter, limits))
    jobs = [bench.submit(prompt=p, max_tokens=40) for p in (3, 9, 4)]
    events = bench.step(20)
    meter.used = 11
    while not any(isinstance(event, JobFinished) for event in events):
        events += bench.step()
    meter.used = 1
    events += bench.finish()
    assert end_of(jobs[1], events).code is Code.NO_CAPACITY
    assert "hard limit" in end_of(jobs[1], events).message
    assert all(len(ids_of(job, events)) == 40 for job in (jobs[0], jobs[2]))
    assert bench.is_clean


# ── the real runner ──────────────────────────────────────────────────────────────────────────


def test_a_pool_beyond_the_hard_limit_stops_the_load(tiny: Path) -> None:
    settings = WorkerSettings(
        model_path=tiny,
        device="cpu",
        kv=KvSettings(blocks=10**7),
        memory=MemorySettings(hard_gib=ProcessMemory().used_bytes() / GIB + 1),
    )
    with pytest.raises(MemoryLimitExceeded, match="KV__BLOCKS"):
        build_engine(settings)


def test_the_pool_is_sized_to_the_hard_limit(tiny: Path) -> None:
    def blocks(hard_gib: float = 0.0) -> int:
        settings = WorkerSettings(
            model_path=tiny,
            device="cpu",
            max_running=4000,
            max_step_tokens=4000,
            memory=MemorySettings(hard_gib=hard_gib),
        )
        with constants_among({"attention": "reference"}):
            return build_engine(settings).engine.stats().kv_blocks_total

    assert blocks() == 4000 * 8
    limit = (ProcessMemory().used_bytes() + 100 * 2**20) / GIB
    assert 2000 < blocks(limit) < 20_000


def test_a_real_step_out_of_memory_gives_the_same_tokens(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Done in parts after its sampling had begun, penalties and seeds included; caches are dropped
    first."""
    dropped: list[ProcessMemory] = []
    # The real one walks through all that the suite has loaded.
    monkeypatch.setattr(ProcessMemory, "drop_caches", lambda meter: dropped.append(meter))

    def texts() -> list[list[int]]:
        settings = WorkerSettings(model_path=tiny, device="cpu", max_step_tokens=16, max_running=8)
        with constants_among({"attention": "reference", "block_tokens": 4}):
            engine = build_engine(settings).engine
        assert isinstance(engine, Engine)
        asked = Sampling(12, seed=3, frequency_penalty=1.0, repetition_penalty=1.2, ignore_eos=True)
        jobs = [Job([5] * n, asked, 1e12) for n in (3, 20, 9, 14)]
        events = run(engine, jobs)
        return [ids_of(job, events) for job in jobs]

    expected = texts()
    assert not dropped
    from worker.sampling.sampler import Sampled

    real, calls = Sampled.read, []

    def read(self: Sampled) -> object:
        calls.append(self)
        if len(calls) % 7 in (2, 3) and len(self.ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self)

    monkeypatch.setattr(Sampled, "read", read)
    with caplog.at_level(logging.WARNING):
        assert texts() == expected
    assert dropped
    assert any("retrying in parts" in record.message for record in caplog.records)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_full_gpu_leaves_the_worker_alive(tiny: Path) -> None:
    """WK-4."""
    settings = WorkerSettings(
        model_path=tiny, device="cuda", kv=KvSettings(blocks=64), max_step_tokens=512
    )
    engine = build_engine(settings).engine
    assert isinstance(engine, Engine)
    before = Job([5] * 100, Sampling(4), 1e12)
    hogs = []
    piece = 2**36
    while piece >= 2**21:  # what is free is not in one piece
        try:
            hogs.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            piece //= 2
    engine.submit(before)
    while engine.scheduler.has_work or engine._inbox:
        engine.step()
    hogs.clear()
    torch.cuda.empty_cache()
    after = Job([5] * 100, Sampling(4, ignore_eos=True), 1e12)
    engine.submit(after)
    events = engine.step()
    while engine.scheduler.has_work:
        events += engine.step()
    assert end_of(after, events).reason is FinishReason.LENGTH


CPU = torch.device("cpu")


def test_a_step_longer_than_the_context_is_several_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a position beyond the model's context ends the whole process."""
    path = make_checkpoint(tmp_path)
    config = read_config(path)
    model = load_model(path, config, torch.float32, CPU)
    allocated = iter([1000, 5000])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(allocated))
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    tokens = 2 * config.context_tokens + 3
    found = build.largest_step_bytes(model, config, CPU, tokens=tokens, rows=5)
    assert found == 4000 + 3 * 5 * config.vocab_size * 4
