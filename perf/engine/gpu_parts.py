"""Sections ``loader``, ``engine`` and ``resume``: the worker's engine without Triton around it."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from perf.engine.bare_engine import Built, build, load
from perf.engine.checkpoints import SHAPES, make_checkpoint
from perf.engine.runs import NEVER, Prompts, Runs, Stepping, greedy
from perf.report.rows import Report
from perf.report.stats import median
from protocol import AbortCause, Sampling
from worker.core import Job
from worker.engine.engine import Engine
from worker.models.config import read_config
from worker.runner.cuda_runner import CudaRunner

# ── loader ───────────────────────────────────────────────────────────────────────────────────


def loader(report: Report, device: torch.device, scratch: Path, name: str) -> None:
    """Write the checkpoint, then load it as a worker does."""
    path, shape = scratch / "model", SHAPES[name]
    started = time.monotonic()
    make_checkpoint(path, shape, seed=0)
    seconds = time.monotonic() - started
    size_gb = shape.file_bytes / 1e9
    note = f"{size_gb:.1f} GB, {shape.num_hidden_layers} layers"
    report.add("checkpoint written", size_gb / seconds, "GB/s", note)
    if device.type == "cuda":
        load(path, device)  # starts CUDA, and has the files in the page cache
        report.attempt("as a worker loads it", lambda: _as_a_worker(report, path))


def _as_a_worker(report: Report, path: Path) -> None:
    """Build the whole engine by a worker's default settings; what is left of the memory then."""
    from worker.engine.build import build_engine
    from worker.settings import WorkerSettings

    started = time.monotonic()
    engine = build_engine(WorkerSettings(model_path=path)).engine
    assert isinstance(engine, Engine)
    seconds = time.monotonic() - started
    tokens = engine.scheduler.pool.total * engine.scheduler.config.block_tokens
    left = torch.cuda.mem_get_info()[0] / 2**30
    note = f"KV for {tokens:,} tokens; {left:.2f} GiB of the device's memory are left"
    report.add("as a worker loads it, page cache warm", seconds, "s", note)
    runs, prompts = Runs(engine), Prompts(1000, seed=12)
    most = engine.scheduler.config.max_running
    for _ in range(most):
        sampling = Sampling(max_tokens=40, temperature=0.8, top_p=0.9, logprobs=5, ignore_eos=True)
        runs.submit(Job(prompts.draw(600), sampling, NEVER))
    runs.step_until_idle()
    left = torch.cuda.mem_get_info()[0] / 2**30
    report.add("memory left after a full batch of it", left, "GiB", f"{most} rows, draws, logprobs")
    engine.stop()


def _made(scratch: Path, name: str) -> Path:
    """The checkpoint, made unless it is there."""
    path = scratch / "model"
    if not (path / "config.json").exists():
        make_checkpoint(path, SHAPES[name], seed=0)
    return path


def resume(report: Report, device: torch.device, scratch: Path, name: str) -> None:
    """First token of a conversation after a restart: from disk, and computed again (WK-6)."""
    from worker.engine.build import build_engine
    from worker.settings import KvSettings, WorkerSettings

    path = _made(scratch, name)
    config = read_config(path)
    tokens = min(8192, config.context_tokens - 16)
    prompt = Prompts(config.vocab_size, seed=13).draw(tokens)
    disk = KvSettings(disk_path=scratch / "kv")
    for what, ids in (("computed", prompt), ("from disk", [*prompt, 11, 12, 13])):
        settings = WorkerSettings(model_path=path, device=device.type, kv=disk)
        built = build_engine(settings).engine
        assert isinstance(built, Engine)
        runs = Runs(built)
        runs.submit(greedy(Prompts(config.vocab_size, seed=14).draw(64), 2))
        runs.step_until_idle()
        run = runs.submit(greedy(ids, 1, session="s"))
        runs.step_until_idle()
        assert run.finished is not None
        cached = f"{run.finished.cached_tokens} of {len(ids)} tokens were cached"
        report.add(f"conversation {what}: first token", 1000 * run.ttft_s, "ms", cached)
        built.stop()


# ── engine ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Sizes:
    batches: tuple[int, ...]
    keys: int
    answer: int
    cancels: int


def engine(report: Report, device: torch.device, scratch: Path, name: str) -> None:
    """Measure the model: recording, decodes, prompts, cancels."""
    path, tiny = _made(scratch, name), name == "tiny"
    sizes = _Sizes((1, 2, 4), 40, 10, 3) if tiny else _Sizes((1, 8, 32, 64), 1024, 96, 25)
    model, config = load(path, device)
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
    for batch in sizes.batches:
        report.attempt(
            f"engine {batch}",
            lambda b=batch: _generate(report, built, b, sizes, vocab=config.vocab_size),  # type: ignore[misc]
        )
    report.attempt("prefill", lambda: _prefill(report, built, sizes, vocab=config.vocab_size))
    report.attempt("cancel", lambda: _cancel(report, built, sizes, config.vocab_size))
    report.attempt("stop", built.engine.stop)


def _generate(report: Report, built: Built, batch: int, sizes: _Sizes, *, vocab: int) -> None:
    """Decode with scheduler, sampler and events, stepped by hand; only steps that decode are
    timed."""
    prompts, runs = Prompts(vocab, seed=5), Runs(built.engine)
    batched = [
        runs.submit(greedy(prompts.draw(sizes.keys - 1), sizes.answer)) for _ in range(batch)
    ]
    while not all(run.ids for run in batched):
        runs.step()
    before, started = sum(len(run.ids) for run in batched), time.monotonic()
    runs.step_until_idle()
    count = sum(len(run.ids) for run in batched) - before
    rate = count / (time.monotonic() - started)
    name = f"engine {batch} x {sizes.keys}, overlap on"
    report.add(name, rate, "tokens/s", f"{count} tokens, up to {sizes.answer} each")


def _prefill(report: Report, built: Built, sizes: _Sizes, *, vocab: int) -> None:
    """Time prompts with one token each."""
    prompts, runs = Prompts(vocab, seed=8), Runs(built.engine)
    count = min(16, max(sizes.batches))
    for _ in range(count):
        runs.submit(greedy(prompts.draw(sizes.keys), 1))
    started = time.monotonic()
    runs.step_until_idle()
    rate = count * sizes.keys / (time.monotonic() - started)
    report.add("prefill", rate, "tokens/s", f"{count} prompts of {sizes.keys}, nothing else")


def _cancel(report: Report, built: Built, sizes: _Sizes, vocab: int) -> None:
    """Time cancels until slot and blocks are free, with the device quiescent, beside other jobs."""
    rng, prompts = np.random.default_rng(6), Prompts(vocab, seed=6)
    beside = max(sizes.batches) // 2
    long = min(sizes.keys // 2, 200)
    times = []
    with Stepping(built.engine) as running:
        others = [running.submit(greedy(prompts.draw(8), sizes.keys)) for _ in range(beside)]
        for _ in range(sizes.cancels):
            run = running.submit(greedy(prompts.draw(long), sizes.keys))
            # Somewhere within it, on a machine whose steps take next to nothing as well.
            about_s = sizes.keys * built.engine.stats().step_ms / 4000
            time.sleep(min(0.01 + float(rng.random()) * 0.05, about_s))
            built.engine.cancel(run.job, AbortCause.CANCEL)
            if running.wait([run], 10) and run.finished and run.finished.abort_ms is not None:
                times.append(run.finished.abort_ms)
        for run in others:
            built.engine.cancel(run.job, AbortCause.CANCEL)
        running.wait(others, 20)
    step_ms = built.engine.stats().step_ms
    note = f"{len(times)} cancels beside {beside} jobs, steps of {step_ms:.1f} ms"
    if not times:
        report.add("cancel to blocks free", "FAILED", note=note)
        return
    report.add("cancel to blocks free, median", median(times), "ms", note)
    report.add("cancel to blocks free, largest", max(times), "ms")
