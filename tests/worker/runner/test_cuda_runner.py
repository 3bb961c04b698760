"""The CUDA runner's logic on the CPU: what a graph would replay is called again instead."""

import math
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from protocol import Code, FinishReason, Sampling
from tests.support.attention_cases import pool_of
from tests.support.engine import end_of, ids_of
from tests.worker.engine.test_engine_thread import Collector
from tests.worker.engine.test_torch_engine import FAR, prompt, run
from worker.attention import AttentionStep, PackedBatch
from worker.attention.reference import ReferenceAttention
from worker.core import Event, Job, JobPaused, JobPrompt, JobTokens
from worker.engine.engine import Engine, EngineConfig
from worker.kv_disk.cuda_copies import memory_of
from worker.models.config import read_config
from worker.models.model import load_model
from worker.runner.base import Runner
from worker.runner.cuda_graphs import GraphRecording, Step
from worker.runner.cuda_runner import CudaRunner, LaunchedOnDevice, build_cuda_runner, warm_up
from worker.runner.device_probe import DeviceProbe
from worker.runner.forward import BatchForward
from worker.runner.torch_runner import SlotLimits, TorchRunner
from worker.sampling.sampler import Sampled, Sampler
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import DeviceTime, StepResult
from worker.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
BLOCKS, BLOCK_TOKENS, MAX_RUNNING = 60, 4, 6


class CallAgain:
    """A ``Recorder`` whose recordings write where the first call did."""

    def record(self, call: Step) -> GraphRecording:
        results = call()

        def replay() -> None:
            for there, value in zip(results, call(), strict=True):
                there.copy_(value)

        return GraphRecording(replay, results)


class RefilledReference(ReferenceAttention):
    """The reference with decodes that read their batch from tensors when they attend."""

    def prepare(self, batch: PackedBatch) -> AttentionStep:
        if batch.table_on_device is not None:
            batch = replace(batch, block_table=batch.table_on_device.numpy().astype(np.int64))
        return super().prepare(batch)

    def decode_step(
        self, slots: Tensor, table: Tensor, contexts: Tensor, most_keys: int
    ) -> AttentionStep:
        backend = self

        class RefilledStep:
            def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
                rows = len(contexts)
                assert contexts.max() <= most_keys
                batch = PackedBatch(
                    decodes=rows,
                    query_tokens=np.ones(rows, np.int64),
                    context_tokens=contexts.numpy().astype(np.int64),
                    block_table=table.numpy().astype(np.int64),
                    slots=slots.numpy().copy(),
                )
                return backend.prepare(batch).attend(layer, queries, keys_values)

        return RefilledStep()


def build(
    path: Path,
    *,
    cuda_like: bool,
    overlap: bool = True,
    graphs: bool = True,
) -> Engine:
    config = read_config(path)
    model = load_model(path, config, torch.float32, CPU)
    heads, layers = config.num_kv_heads, config.num_layers
    pool = pool_of(BLOCKS + 1, heads, config.head_dim, layers=layers, page=BLOCK_TOKENS)
    attention = (RefilledReference if graphs else ReferenceAttention)(pool, config.num_heads)
    max_blocks = config.context_tokens // BLOCK_TOKENS
    sampler = Sampler(
        config.eos_token_ids,
        CPU,
        slots=MAX_RUNNING,
        vocab_size=config.vocab_size,
        max_tokens=config.context_tokens,
    )
    limits = SlotLimits(BLOCK_TOKENS, MAX_RUNNING, max_blocks)
    runner: Runner = (
        build_cuda_runner(
            BatchForward(model, attention),
            sampler,
            limits,
            device=CPU,
            dummy_block=BLOCKS,
            recorder=CallAgain(),
        )
        if cuda_like
        else TorchRunner(BatchForward(model, attention), sampler, limits, device=CPU)
    )
    scheduler = Scheduler(
        SchedulerConfig(
            vocab_size=config.vocab_size,
            context_tokens=config.context_tokens,
            block_tokens=BLOCK_TOKENS,
            max_running=MAX_RUNNING,
            max_waiting=64,
            max_step_tokens=24,
            min_start_budget_s=0.0,
            tile_tokens=1,
        ),
        BlockPool(BLOCKS, memory_of(pool.data).clear),
    )
    return Engine(scheduler, runner, EngineConfig(config.eos_token_ids, overlap=overlap))


def jobs() -> list[Job]:
    """Every way to sample, prompts long and short, ends by length and by end of sequence."""
    ways: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.2, "seed": 9, "min_tokens": 6, "ignore_eos": False},
        {"temperature": 0.0, "logit_bias": ((7, 3.0), (11, 2.0))},
        {"temperature": 1.5, "seed": 2, "top_k": 5, "presence_penalty": 0.5, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "prompt_logprobs": 0, "max_tokens": 0},
    ]
    made = []
    for n in range(18):
        way = {"max_tokens": 3 + n * 5 % 17, "ignore_eos": True} | ways[n % len(ways)]
        made.append(Job(prompt(1 + n * 7 % 40, seed=n), Sampling(**way), FAR))  # type: ignore[arg-type]
    return made


Answers = list[tuple[list[int], FinishReason, list[object], list[object]]]


def answers(engine: Engine) -> Answers:
    """Log-probabilities to within what another shape of a matrix product makes of them."""
    todo = jobs()
    events = run(engine, todo)
    return [
        (
            ids_of(job, events),
            end_of(job, events).reason,
            [
                (
                    pytest.approx(one.logprob, abs=1e-4),
                    [token for token, _ in one.top],
                    one.rank > 0,
                )
                for event in events
                if isinstance(event, JobTokens) and event.job is job and event.logprobs
                for one in event.logprobs
            ],
            [
                pytest.approx(one.logprob, abs=1e-4)
                for event in events
                if isinstance(event, JobPrompt) and event.job is job
                for one in event.logprobs.unpack()
            ],
        )
        for job in todo
    ]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Answers:
    """What the plain runner makes of the jobs."""
    return answers(build(tiny, cuda_like=False))


@pytest.fixture(scope="module")
def poisoned(
    tiny: Path, plain: Answers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Answers]:
    """A model with NaN for two tokens that some of the jobs come to, so that their texts spoil
    themselves, and what the plain runner makes of it."""
    path = shutil.copytree(tiny, tmp_path_factory.mktemp("poisoned") / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][[ids[1] for ids, *_ in plain[3:5]]] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path, answers(build(path, cuda_like=False))


@pytest.mark.parametrize(
    ("overlap", "graphs"), [(True, True), (False, False)], ids=["overlap, graphs", "plain, eager"]
)
def test_texts_that_are_not_finite_end_as_with_the_plain_runner(
    poisoned: tuple[Path, Answers], overlap: bool, graphs: bool
) -> None:
    """WK-12: in prompts and in decodes, with the next step launched already; and no others do."""
    path, expected = poisoned
    ends = [reason for _, reason, *_ in expected]
    assert 2 < ends.count(FinishReason.ERROR) < len(ends) - 2
    engine = build(path, cuda_like=True, overlap=overlap, graphs=graphs)
    assert answers(engine) == expected
    assert engine.stats().not_finite_total == ends.count(FinishReason.ERROR)


@pytest.mark.parametrize(
    ("overlap", "graphs"),
    [(True, True), (True, False), (False, False)],
    ids=["overlap, graphs", "overlap, eager", "plain, eager"],
)
def test_tokens_are_those_of_the_plain_runner(
    tiny: Path, plain: Answers, overlap: bool, graphs: bool
) -> None:
    """LB-7: greedy and drawn, with penalties, biases and log-probabilities. Graphs without overlap
    are in the test below."""
    engine = build(tiny, cuda_like=True, overlap=overlap, graphs=graphs)
    assert isinstance(engine.executor.runner, CudaRunner)
    assert (engine.executor.runner._graphs is not None) == graphs
    assert (engine.executor.launcher is not None) == overlap
    assert answers(engine) == plain


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
def test_pauses_change_no_token(tiny: Path, plain: Answers, overlap: bool) -> None:
    """Jobs come back to other slots, in which others have been, and to their own of long ago."""
    engine = build(tiny, cuda_like=True, overlap=overlap)
    todo = jobs()
    for job in todo:
        engine.submit(job)
    draw = np.random.default_rng(3)
    events: list[Event] = []
    while engine.scheduler.has_work or engine._inbox:
        for job in todo:
            if draw.random() < 0.15:
                (engine.resume if job.pause_requested else engine.pause)(job)
        events += engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.used_count == 0
    assert sum(isinstance(event, JobPaused) for event in events) > len(todo)
    assert [ids_of(job, events) for job in todo] == [ids for ids, *_ in plain]


def test_decodes_are_replayed_and_padding_touches_nothing_real(tiny: Path) -> None:
    """Three rows on a recording of four: the fourth works on the dummy page."""
    engine = build(tiny, cuda_like=True)
    runner = engine.executor.runner
    assert isinstance(runner, CudaRunner) and runner._graphs is not None
    assert isinstance(runner._forward, BatchForward)
    pool = runner._forward.attention._pool  # type: ignore[attr-defined]
    todo = [Job(prompt(5, seed=n), Sampling(max_tokens=6, temperature=0.0), FAR) for n in range(3)]
    for job in todo:
        engine.submit(job)
    engine.step()
    used = {block for request in engine.scheduler.running for block in request.blocks}
    others = [block for block in range(BLOCKS) if block not in used]
    pool.data[:, others] = 77.0
    pool.data[:, BLOCKS] = 0.0
    replays = 0
    plain = runner._graphs.replay

    def counted(*args: object) -> object:
        nonlocal replays
        replays += 1
        return plain(*args)  # type: ignore[arg-type]

    runner._graphs.replay = counted  # type: ignore[method-assign,assignment]
    while engine.scheduler.has_work:
        engine.step()
    assert replays == 5
    assert (pool.data[:, others] == 77.0).all()
    assert pool.data[:, BLOCKS].any(), "no padding"


@pytest.mark.parametrize(
    ("ways", "whole_passes"),
    [
        ([{"temperature": 0.0}], 0),
        ([{"temperature": 0.9, "seed": 4}, {"temperature": 0.0}], 0),
        ([{"temperature": 0.9, "seed": 4}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}], 7),
        ([{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 1}], 7),
    ],
)
def test_what_is_drawn_from_the_whole_vocabulary_is_recorded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, ways: list[dict[str, Any]], whole_passes: int
) -> None:
    """The prompts' own step is not; its tokens and those of the recorded steps are the same."""

    def todo() -> list[Job]:
        return [
            Job(prompt(5, seed=n), Sampling(max_tokens=8, ignore_eos=True, **way), FAR)
            for n, way in enumerate(ways)
        ]

    plain, replayed = todo(), todo()
    events = run(build(tiny, cuda_like=False), plain)
    expected = [ids_of(job, events) for job in plain]
    engine = build(tiny, cuda_like=True)
    passes, sample = 0, Sampler.sample

    def counted(*args: Any) -> Sampled:
        nonlocal passes
        passes += 1
        return sample(*args)

    monkeypatch.setattr(Sampler, "sample", counted)
    events = run(engine, replayed)
    assert [ids_of(job, events) for job in replayed] == expected
    assert passes == whole_passes + 1


def test_a_step_that_fails_to_be_read_is_done_over_to_the_same_tokens(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws, and what penalties have counted for the tokens that were taken back."""

    def todo() -> list[Job]:
        few = tuple((token, 100.0) for token in range(5, 11))  # which come again and again
        drawn = {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.5, "logit_bias": few}
        return [Job(prompt(9, seed=n), Sampling(max_tokens=20, **drawn), FAR) for n in range(4)]  # type: ignore[arg-type]

    good, again = todo(), todo()
    events = run(build(tiny, cuda_like=True), good)
    collect, calls = LaunchedOnDevice.collect, iter(range(10**6))

    def fails_now_and_then(step: LaunchedOnDevice) -> StepResult:
        found = collect(step)
        if next(calls) % 7 == 6:
            raise RuntimeError("illegal access")
        return found

    monkeypatch.setattr(LaunchedOnDevice, "collect", fails_now_and_then)
    after = run(build(tiny, cuda_like=True), again)
    assert next(calls) > 20
    assert [ids_of(job, after) for job in again] == [ids_of(job, events) for job in good]


def test_the_warm_up_touches_the_dummy_page_only(tiny: Path) -> None:
    """LB-6: it runs before any request, but the disk may have filled the pool by then."""
    engine = build(tiny, cuda_like=True)
    runner = engine.executor.runner
    assert isinstance(runner, CudaRunner) and isinstance(runner._forward, BatchForward)
    pool = runner._forward.attention._pool  # type: ignore[attr-defined]
    pool.data.fill_(7.0)
    lengths: list[int] = []
    prepare = runner._forward.attention.prepare

    def noted(batch: PackedBatch) -> AttentionStep:
        lengths.append(int(batch.context_tokens[0]))
        return prepare(batch)

    runner._forward.attention.prepare = noted  # type: ignore[method-assign]
    warm_up(runner._forward, BLOCKS, SlotLimits(BLOCK_TOKENS, MAX_RUNNING, 32), device=CPU)
    assert lengths == [1, 32 * BLOCK_TOKENS, BLOCK_TOKENS, 32 * BLOCK_TOKENS]
    assert (pool.data[:, :BLOCKS] == 7.0).all()
    assert not (pool.data[:, BLOCKS] == 7.0).all()


def test_a_runner_whose_device_is_lost_can_be_closed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call fails then, also one that gives memory back."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = build(tiny, cuda_like=True).executor.runner
    assert isinstance(runner, CudaRunner)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    runner._device, runner._probe = torch.device("cuda"), DeviceProbe(fail, timeout_s=60.0)
    runner.close()
    assert runner._forward is None and runner._state is None


class FakeEvent:
    """A mark in a stream whose clock only ``now_ms`` moves."""

    now_ms = 0.0

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: object) -> float:
        assert isinstance(end_event, FakeEvent)
        return end_event.at_ms - self.at_ms


def test_a_step_has_the_devices_time_and_its_idle_gap(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WK-15: busy for 3 of every 4 ms."""
    engine = build(tiny, cuda_like=True)
    runner = engine.executor.runner
    assert isinstance(runner, CudaRunner)
    assert runner._make_event is None, "the CPU has no clock of its own"
    runner._make_event = FakeEvent
    compute = runner._compute

    def computes(*given: Any) -> Any:
        FakeEvent.now_ms += 3
        return compute(*given)

    monkeypatch.setattr(runner, "_compute", computes)
    for _ in range(2):
        FakeEvent.now_ms += 1
        engine.submit(Job([9, 8, 7], Sampling(max_tokens=1), math.inf))
        engine.step()
        while engine.scheduler.has_work or engine.executor.in_flight:
            engine.step()
    latest = runner._latest
    assert latest is not None and latest.marks is not None
    assert latest.marks.time() == pytest.approx((0.003, 0.001, 0.0))
    assert engine.stats().stream_utilization > 0.75


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_steps_and_gaps_add_up_to_the_time_that_passed(tiny: Path) -> None:
    from worker.engine.build import build_engine
    from worker.settings import WorkerSettings

    engine = build_engine(WorkerSettings(model_path=tiny, device="cuda", dtype="float32")).engine
    assert isinstance(engine, Engine)
    times: list[DeviceTime] = []
    note = engine.executor._note_use
    engine.executor._note_use = lambda time: (times.append(time), note(time))  # type: ignore
    begun = time.monotonic()
    run(engine, jobs())
    passed_s = time.monotonic() - begun
    engine.stop()
    assert all(one.busy_s > 0 for one in times)
    counted_s = sum(one.busy_s for one in times) + sum(one.idle_s for one in times[1:])
    assert counted_s <= passed_s * 1.01
    assert 0 < engine.executor.stream_utilization <= 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_overlap_changes_no_token(tiny: Path) -> None:
    from worker.engine.build import build_engine
    from worker.settings import WorkerSettings

    def texts(**more: Any) -> list[list[int]]:
        settings = WorkerSettings(model_path=tiny, device="cuda", dtype="float32", max_running=6)
        engine = build_engine(settings.model_copy(update=more)).engine
        assert isinstance(engine, Engine) and isinstance(engine.executor.runner, CudaRunner)
        todo = jobs()
        events = run(engine, todo)
        engine.stop()
        return [ids_of(job, events) for job in todo]

    assert texts() == texts(overlap=False)


class DyingDevice:
    """What a ``CudaRunner`` runs on: ``dies`` says how a step fails from now on, and whether the
    device answers afterwards."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: Engine) -> None:
        self._patch = patch
        self._gate = threading.Event()
        self._lost: Exception | None = None
        self._hangs = False
        runner = engine.executor.runner
        assert isinstance(runner, CudaRunner)
        runner._probe = DeviceProbe(self._answer, timeout_s=60.0)
        self.runner = runner

    def dies(self, way: str) -> None:
        sticky = RuntimeError("CUDA error: an illegal memory access was encountered")
        if way == "hangs when it is asked":
            self._hangs = True
            self.runner._probe = DeviceProbe(self._answer, timeout_s=0.02)
        else:
            self._lost = sticky
        if way == "in a step that is read":
            self._patch.setattr(LaunchedOnDevice, "_wait", self._raise)
        else:
            self._patch.setattr(CudaRunner, "_launch", self._raise)

    def release(self) -> None:
        self._gate.set()

    def _raise(self, *args: object) -> None:
        raise self._lost or RuntimeError("CUDA error: unspecified launch failure")

    def _answer(self) -> None:
        if self._hangs:
            self._gate.wait(60.0)
        if self._lost is not None:
            raise self._lost


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "way", ["when a step is launched", "in a step that is read", "hangs when it is asked"]
)
def test_a_device_that_dies_takes_the_engine_with_it_and_blames_no_request(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    overlap: bool,
) -> None:
    engine, sink = build(tiny, cuda_like=True, overlap=overlap), Collector()
    device = DyingDevice(monkeypatch, engine)
    begun = [Job(prompt(4), Sampling(max_tokens=20, ignore_eos=True), FAR) for _ in range(6)]
    waiting = [Job(prompt(4), Sampling(max_tokens=20, ignore_eos=True), FAR) for _ in range(2)]
    engine.connect(sink)
    for job in begun + waiting:
        engine.submit(job)
    sink(engine.step() + engine.step())
    device.dies(way)
    engine.start(sink)
    sink.wait_ended(8)
    assert engine.has_failed
    for job in begun:
        assert end_of(job, sink.events).code is Code.INSTANCE_LOST
    for job in waiting:
        assert end_of(job, sink.events).code is Code.DRAINING, "these had no part in it"
    late = Job(prompt(4), Sampling(max_tokens=1), FAR)
    engine.submit(late)
    sink.wait_ended(9)
    assert end_of(late, sink.events).code is Code.DRAINING
    assert caplog.text.count("ending all jobs, accepting no more") == 1
    assert "retrying it in halves" not in caplog.text
    device.release()
