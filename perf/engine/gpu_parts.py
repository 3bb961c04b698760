"""Sections ``tokens``, ``loader`` and ``engine``: the worker's engine without Triton around it."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from perf.engine.gpu_model import LLAMA_8B, TINY, Built, Shape, build, load, write_checkpoint
from perf.engine.timing import copy_gb_per_s, synchronize, timed_ms
from perf.report.rows import Report
from worker.attention import KVPool
from worker.attention.triton_backend import TritonAttention
from worker.core import Event, Job, JobFinished, JobTokens
from worker.models.config import ModelConfig
from worker.models.model import Model
from worker.protocol import AbortCause, FinishReason, Sampling
from worker.runner.cuda_runner import CudaRunner
from worker.runner.forward import TiledForward

_NEVER = 1e12
_EXACT = Shape(4, 256, 512, 8, 2, 32, 1000, 512, "float32")
_HALF = Shape(4, 256, 512, 8, 2, 32, 1000, 512, "bfloat16")


# ── tokens ───────────────────────────────────────────────────────────────────────────────────


def tokens(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """A small model: the same greedy tokens as on the CPU, whatever runs them."""
    for shape in (_EXACT, _HALF):
        path = scratch / f"small-{shape.dtype}"
        write_checkpoint(path, shape, within_s=10)
    cpu = torch.device("cpu")
    exact = load(scratch / "small-float32", cpu)
    expected = _texts(build(*exact, cpu, max_running=12, blocks=400))

    here = load(scratch / "small-float32", device)
    for attention in ("triton", "reference") if device.type == "cuda" else ("reference",):
        for overlap in (True, False):

            def compare(attention: str = attention, overlap: bool = overlap) -> None:
                built = build(
                    *here,
                    device,
                    max_running=12,
                    blocks=400,
                    attention=attention,  # type: ignore[arg-type]
                    overlap=overlap,
                )
                got = _texts(built)
                built.engine.stop()
                same = sum(a == b for a, b in zip(got, expected, strict=True))
                report.add(
                    f"float32, {attention}, overlap {'on' if overlap else 'off'}",
                    f"{same}/{len(expected)}",
                    "texts",
                    "greedy, equal to the CPU's",
                )

            report.attempt(f"float32, {attention}, overlap {overlap}", compare)
    if device.type == "cuda":
        for dtype in ("float32", "bfloat16"):
            report.attempt(
                f"deterministic mode, {dtype}",
                lambda d=dtype: _deterministic(report, *load(scratch / f"small-{d}", device), d),  # type: ignore[misc]
            )


def _texts(built: Built) -> list[list[int]]:
    rng = np.random.default_rng(3)
    jobs = [
        _job(rng.integers(2, 999, 1 + n * 13 % 150).tolist(), 8 + n * 5 % 40) for n in range(24)
    ]
    ids: dict[int, list[int]] = {id(job): [] for job in jobs}
    for job in jobs:
        built.engine.submit(job)
    while True:
        for event in built.engine.step():
            if isinstance(event, JobTokens):
                ids[id(event.job)] += event.ids
        if not built.engine.scheduler.has_work:
            return [ids[id(job)] for job in jobs]


def _deterministic(report: Report, model: Model, config: ModelConfig, name: str) -> None:
    device = torch.device("cuda")
    pool = KVPool(
        layers=config.num_layers,
        blocks=64,
        block_tokens=16,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=getattr(torch, config.dtype),
        device=device,
    )
    tiled = TiledForward(model, TritonAttention(pool, config.num_heads, invariant=True))
    tiled.check(vocab_size=config.vocab_size, block_tokens=16, max_tokens=256, device=device)
    report.add(f"deterministic mode, {name}", "holds", "", "to the bit, in any company")


# ── loader ───────────────────────────────────────────────────────────────────────────────────


def loader(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Write the large checkpoint, then load it from disk and from the page cache."""
    shape = TINY if tiny else LLAMA_8B
    path = scratch / "large"
    shape, seconds = write_checkpoint(path, shape, within_s=min(45.0, report.left_s * 0.4))
    size_gb = shape.file_bytes / 1e9
    report.add(
        "checkpoint written", size_gb / seconds, "GB/s", f"{size_gb:.1f} GB, {shape.layers} layers"
    )

    def timed(what: str) -> None:
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        synchronize(device)
        started = time.monotonic()
        model, _ = load(path, device)
        synchronize(device)
        seconds = time.monotonic() - started
        note = f"{seconds:.2f} s"
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
            note += f", peak {peak / 1e9:.2f} GB on the device"
        report.add(what, size_gb / seconds, "GB/s", note)
        del model

    def cold() -> None:
        for file in path.glob("*.safetensors"):
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
        timed("load, cold (page cache dropped)")

    # The first load also starts CUDA.
    synchronize(device)
    report.attempt("load, warm", lambda: timed("load, warm (in the page cache)"))
    report.attempt("load, warm again", lambda: timed("load, warm again"))
    report.attempt("load, cold", cold)


# ── engine ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Sizes:
    batches: tuple[int, ...]
    keys: int
    answer: int
    jobs: int
    cancels: int


def engine(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """The large model: recording, decodes, cancels, a mixed load."""
    path = scratch / "large"
    if not (path / "config.json").exists():
        write_checkpoint(path, TINY if tiny else LLAMA_8B, within_s=min(45.0, report.left_s * 0.4))
    sizes = (
        _Sizes((1, 2, 4), 40, 10, 30, 3) if tiny else _Sizes((1, 8, 16, 32, 64), 1024, 96, 300, 25)
    )
    model, config = load(path, device)
    shape = _shape_of(config)
    most = max(sizes.batches)
    blocks = most * -(-(sizes.keys + sizes.answer) // 16) + 16
    built = build(model, config, device, max_running=most, blocks=blocks, max_step_tokens=2048)
    for one in built.attention.tried:
        report.add(
            f"attention tried at load: {one.name}",
            one.step_us if one.problem is None else "out",
            "µs/layer" if one.problem is None else "",
            one.problem or f"error {one.error:.1e}",
        )
    report.add("attention in use", built.attention.name)
    runner = built.runner
    assert isinstance(runner, CudaRunner)
    graphs = runner._graphs
    if graphs is not None:
        report.add("graphs recorded in", graphs.seconds, "s", f"{len(graphs._recorded)} sizes")
        report.add("graphs take", graphs.bytes / 2**20, "MiB")
    copy = copy_gb_per_s(device, 2**20 if tiny else 2 * 2**30)
    report.add("copy on the device", copy, "GB/s", "read plus written; the bound below")
    for batch in sizes.batches:
        report.attempt(
            f"decode {batch}",
            lambda b=batch: _decode(report, built, shape, b, sizes.keys, copy),  # type: ignore[misc]
        )
    for batch in sizes.batches:
        report.attempt(
            f"engine {batch}",
            lambda b=batch: _generate(report, built, b, sizes, vocab=config.vocab_size),  # type: ignore[misc]
        )
    report.attempt("prefill", lambda: _prefill(report, built, sizes, vocab=config.vocab_size))
    report.attempt("cancel", lambda: _cancel(report, built, sizes, config.vocab_size))
    report.attempt("mixed load", lambda: _mixed(report, built, sizes, config.vocab_size))
    report.attempt("stop", built.engine.stop)


def _shape_of(config: ModelConfig) -> Shape:
    c = config
    return Shape(
        c.num_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        c.vocab_size,
        c.context_tokens,
        c.dtype,
    )


def _decode(
    report: Report, built: Built, shape: Shape, batch: int, keys: int, copy_gb_s: float
) -> None:
    """The recorded step by the device's clock: what the memory is used for, without the engine."""
    runner = built.runner
    assert isinstance(runner, CudaRunner)
    graphs, state = runner._graphs, runner._state
    if graphs is None or state is None:
        report.add(f"decode {batch} x {keys}", "left out", note="nothing is recorded here")
        return
    rng = np.random.default_rng(4)
    width = state.blocks.shape[1]
    per_row = -(-keys // 16)
    order = rng.permutation(built.engine.scheduler.pool.total)
    for slot in range(batch):
        row = np.zeros(width, np.int64)
        row[:per_row] = order[slot * per_row : (slot + 1) * per_row]
        state.begin(slot, row)
    ids = rng.integers(2, shape.vocab, batch)
    positions, slots = np.full(batch, keys - 1), np.arange(batch)
    device = built.pool.device
    with torch.inference_mode():
        ms = timed_ms(lambda: graphs.replay(ids, positions, slots), device)
    # Slots begin anew for the engine's own requests.
    nbytes = shape.step_bytes + batch * keys * shape.kv_token_bytes
    share = nbytes / ms / 1e6 / copy_gb_s
    report.add(
        f"decode {batch} x {keys}, device",
        batch / ms * 1e3,
        "tokens/s",
        f"{ms:.2f} ms, {nbytes / ms / 1e6:.0f} GB/s = {share:.0%} of the copy bandwidth",
    )


def _job(ids: list[int], answer: int, *, deadline: float = _NEVER, **changes: object) -> Job:
    parameters = {"max_tokens": answer, "temperature": 0.0, "ignore_eos": True} | changes
    return Job(ids, Sampling(**parameters), deadline)  # type: ignore[arg-type]


def _prompt(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    ids: list[int] = rng.integers(2, vocab, length).tolist()
    return ids


def _generate(report: Report, built: Built, batch: int, sizes: _Sizes, *, vocab: int) -> None:
    """Through scheduler, sampler and events, stepped by hand; steps that only decode are timed."""
    runner, engine = built.runner, built.engine
    assert isinstance(runner, CudaRunner)
    for overlap in (True, False):
        engine._launcher = runner if overlap else None
        rng = np.random.default_rng(5)
        for _ in range(batch):
            engine.submit(_job(_prompt(rng, sizes.keys - 1, vocab), sizes.answer))
        begun: set[int] = set()
        while len(begun) < batch:
            begun |= {id(e.job) for e in engine.step() if isinstance(e, JobTokens)}
        count, started = 0, time.monotonic()
        while engine.scheduler.has_work:
            count += sum(len(e.ids) for e in engine.step() if isinstance(e, JobTokens))
        rate = count / (time.monotonic() - started)
        name = f"engine {batch} x {sizes.keys}, overlap {'on' if overlap else 'off'}"
        report.add(name, rate, "tokens/s", f"{count} tokens, up to {sizes.answer} each")
        if overlap:
            report.add(f"{name}: stream utilization", runner.stream_utilization, "", "sampled")
    engine._launcher = runner


def _prefill(report: Report, built: Built, sizes: _Sizes, *, vocab: int) -> None:
    """Prompts and one token each; then one prompt beside decodes, and what it does to them."""
    engine = built.engine
    rng = np.random.default_rng(8)
    count = min(16, max(sizes.batches))
    for _ in range(count):
        engine.submit(_job(_prompt(rng, sizes.keys, vocab), 1))
    started = time.monotonic()
    _drain(built)
    rate = count * sizes.keys / (time.monotonic() - started)
    report.add("prefill", rate, "tokens/s", f"{count} prompts of {sizes.keys}, nothing else")

    others = [_job(_prompt(rng, 8, vocab), sizes.keys) for _ in range(count - 1)]
    for job in others:
        engine.submit(job)
    for _ in range(12):
        engine.step()
    length = sizes.keys // 2
    gaps: list[float] = []
    plain: list[float] = []
    for kind in (plain, gaps):
        probe = _job(_prompt(rng, length, vocab), 1)
        started = at = time.monotonic()
        if kind is gaps:
            engine.submit(probe)
        for _ in range(40):
            events = engine.step()
            kind.append((time.monotonic() - at) * 1e3)
            at = time.monotonic()
            if any(isinstance(event, JobFinished) and event.job is probe for event in events):
                note = f"{length} tokens beside {len(others)} decodes"
                report.add("first token", (at - started) * 1e3, "ms", note)
                break
    note = f"largest, with a prompt beside; {max(plain):.1f} ms without"
    report.add("time between tokens", max(gaps), "ms", note)
    for job in others:
        engine.cancel(job, AbortCause.CANCEL)
    _drain(built)


def _drain(built: Built) -> None:
    built.engine.step()
    while built.engine.scheduler.has_work:
        built.engine.step()


class _Running:
    """The engine on its own thread, with what it has said."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.ended: dict[int, JobFinished] = {}
        self.tokens = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        engine = self.built.engine
        while not self._stopping:
            events = engine.step()
            if events:
                self._note(events)
            elif not engine.scheduler.has_work:
                time.sleep(0.0005)

    def _note(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                if isinstance(event, JobFinished):
                    self.ended[id(event.job)] = event
                elif isinstance(event, JobTokens):
                    self.tokens += len(event.ids)
            self._changed.notify_all()

    def wait(self, jobs: list[Job], within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: all(id(job) in self.ended for job in jobs), timeout=within_s
            )

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()


def _cancel(report: Report, built: Built, sizes: _Sizes, vocab: int) -> None:
    """From the cancel to slot and blocks free, with the device quiescent, beside other jobs."""
    running = _Running(built)
    rng = np.random.default_rng(6)
    beside = max(sizes.batches) // 2
    long = min(sizes.keys // 2, 200)
    others = [_job(_prompt(rng, 8, vocab), sizes.keys) for _ in range(beside)]
    for job in others:
        built.engine.submit(job)
    times = []
    for _ in range(sizes.cancels):
        job = _job(_prompt(rng, long, vocab), sizes.keys)
        built.engine.submit(job)
        time.sleep(0.01 + float(rng.random()) * 0.05)
        built.engine.cancel(job, AbortCause.CANCEL)
        if running.wait([job], 10) and running.ended[id(job)].abort_ms is not None:
            times.append(float(running.ended[id(job)].abort_ms or 0.0))
    for job in others:
        built.engine.cancel(job, AbortCause.CANCEL)
    running.wait(others, 20)
    running.stop()
    step_ms = built.engine.stats().step_ms
    note = f"{len(times)} cancels beside {beside} jobs, steps of {step_ms:.1f} ms"
    if not times:
        report.add("cancel to blocks free", "FAILED", note=note)
        return
    report.add("cancel to blocks free, median", median(times), "ms", note)
    report.add("cancel to blocks free, largest", max(times), "ms")


def _mixed(report: Report, built: Built, sizes: _Sizes, vocab: int) -> None:
    """Prompts and answers of all lengths, cancels and deadlines among them; nothing may be left."""
    device, scheduler = built.pool.device, built.engine.scheduler
    rng = np.random.default_rng(7)
    running = _Running(built)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    started = time.monotonic()
    jobs = []
    for n in range(sizes.jobs):
        kind = rng.random()
        changes: dict[str, object] = {"temperature": 0.8, "seed": n} if kind < 0.5 else {}
        deadline = time.monotonic() + 0.2 if kind > 0.93 else _NEVER
        length, answer = int(rng.integers(1, sizes.keys)), int(rng.integers(1, sizes.answer))
        job = _job(_prompt(rng, length, vocab), answer, deadline=deadline, **changes)
        jobs.append(job)
        built.engine.submit(job)
        if kind < 0.15:
            threading.Timer(
                float(rng.random()), built.engine.cancel, (job, AbortCause.CANCEL)
            ).start()
    done = running.wait(jobs, max(5.0, min(90.0, report.left_s - 5)))
    seconds = time.monotonic() - started
    running.stop()
    ends = [running.ended[id(job)] for job in jobs if id(job) in running.ended]
    reasons = {
        reason.value: sum(end.reason is reason for end in ends)
        for reason in FinishReason
        if any(end.reason is reason for end in ends)
    }
    report.add("mixed load", running.tokens / seconds, "tokens/s", f"{seconds:.1f} s, {reasons}")
    report.add("mixed load: late tokens, most of a job", max(end.late_tokens for end in ends))
    clean = done and scheduler.pool.used_count == 0 and not scheduler.has_work
    if clean:
        scheduler.check_integrity()
    report.add("mixed load: all blocks and slots back", "yes" if clean else "NO")
    if device.type == "cuda":
        grown = (torch.cuda.memory_allocated(device) - before) / 2**20
        report.add("mixed load: device memory grown", grown, "MiB")
    assert isinstance(built.runner, CudaRunner)
    report.add("mixed load: stream utilization", built.runner.stream_utilization, "", "sampled")
