"""Section ``adapter``: vLLM as a worker's engine, where it is installed.

``vllm`` measures vLLM by itself; this is the same checkpoint behind Tidegate's deadlines, with what
the engine's card promises.
"""

import importlib.util
import time
from pathlib import Path

import torch
from msgspec.structs import replace as changed

from perf.engine.runs import NEVER, Prompts, Runs, greedy
from perf.report.rows import Report
from perf.report.stats import median
from protocol import AbortCause, Sampling
from worker.core import Job
from worker.loaded import LoadedEngine

_WITHIN_S = 60.0


def adapter(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Load by a worker's defaults; decodes, cancels, pauses, and texts begun elsewhere."""
    if importlib.util.find_spec("vllm") is None:
        report.add("vLLM", "left out", note="it is not installed")
        return
    path = scratch / "large"
    if not (path / "config.json").exists():
        report.add("vLLM", "left out", note="section loader or engine writes the checkpoint")
        return
    from worker.engines import load_engine
    from worker.settings import WorkerSettings

    batches, prompt, answer = ((1, 2), 40, 20) if tiny else ((1, 8, 32, 64), 1024, 96)
    started = time.monotonic()
    loaded = load_engine(
        WorkerSettings(
            model_path=path, engine="vllm", device="cpu" if device.type == "cpu" else "cuda"
        )
    )
    note = f"{loaded.card.engine_version}; ms by phase: {loaded.load_ms}"
    report.add("as a worker loads it", time.monotonic() - started, "s", note)
    runs = Runs(loaded.engine)
    loaded.engine.start(runs.take)
    for batch in batches:
        report.attempt(
            f"decode {batch}",
            lambda b=batch: _decode(report, runs, b, prompt, answer),  # type: ignore[misc]
        )
    report.attempt("cancel", lambda: _cancel(report, runs, max(batches) // 2, prompt))
    for kind, sampling in (
        ("greedy", Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True)),
        ("drawn", Sampling(max_tokens=answer, temperature=0.8, seed=7, ignore_eos=True)),
    ):
        report.attempt(
            f"pause, {kind}",
            lambda k=kind, s=sampling: _pause(report, loaded, runs, k, s),  # type: ignore[misc]
        )
        report.attempt(
            f"begun, {kind}",
            lambda k=kind, s=sampling: _begun(report, loaded, runs, k, s),  # type: ignore[misc]
        )
    report.add("blocks in use at the end", loaded.engine.stats().kv_blocks_used)
    report.attempt("stop", loaded.engine.stop)


def _decode(report: Report, runs: Runs, batch: int, prompt: int, answer: int) -> None:
    """Tokens per second from the moment on at which every text has its first token."""
    prompts = Prompts(250, seed=batch)
    batched = [runs.submit(greedy(prompts.draw(prompt), answer)) for _ in range(batch)]
    runs.wait_ended(*batched)
    began = max(run.token_times[0] for run in batched)
    times = [at for run in batched for at in run.token_times if at > began]
    rate = len(times) / (max(times) - began)
    report.add(f"vLLM in the worker {batch} x {prompt}", rate, "tokens/s")


def _cancel(report: Report, runs: Runs, beside: int, prompt: int) -> None:
    """Time cancels until their ends are told, which is when their blocks are free."""
    prompts, times = Prompts(250, seed=3), []
    others = [runs.submit(greedy(prompts.draw(8), 2000)) for _ in range(beside)]
    for _ in range(15):
        run = runs.submit(greedy(prompts.draw(prompt), 2000))
        runs.wait_for(lambda r=run: bool(r.ids), _WITHIN_S)  # type: ignore[misc]
        started = time.perf_counter()
        runs.engine.cancel(run.job, AbortCause.CANCEL)
        runs.wait_ended(run)
        times.append((time.perf_counter() - started) * 1e3)
    for run in others:
        runs.engine.cancel(run.job, AbortCause.CANCEL)
    runs.wait_ended(*others)
    note = f"beside {beside} jobs; largest {max(times):.1f} ms"
    report.add("cancel to its end, median", median(times), "ms", note)


def _pause(report: Report, loaded: LoadedEngine, runs: Runs, kind: str, sampling: Sampling) -> None:
    """Pause a text in its middle; it goes on with the tokens that it has without."""
    if not loaded.card.can_pause:
        report.add(f"pause, {kind}", "left out", note="the card says that it cannot")
        return
    ids = Prompts(250, seed=5).draw(40)
    alone = runs.submit(Job(ids, sampling, NEVER))
    runs.wait_ended(alone)
    paused = runs.submit(Job(ids, sampling, NEVER))
    runs.wait_for(lambda: len(paused.ids) >= sampling.max_tokens // 3, _WITHIN_S)
    runs.engine.pause(paused.job)
    time.sleep(0.3)
    held = runs.engine.stats().kv_blocks_used
    runs.engine.resume(paused.job)
    runs.wait_ended(paused)
    is_same = "yes" if paused.ids == alone.ids else "NO"
    report.add(f"a paused text goes on as without, {kind}", is_same, "", f"{held} blocks held")


def _begun(report: Report, loaded: LoadedEngine, runs: Runs, kind: str, sampling: Sampling) -> None:
    """Go on with a text as if another worker had begun it."""
    if not loaded.card.can_continue:
        report.add(f"begun elsewhere, {kind}", "left out", note="the card says that it cannot")
        return
    ids = Prompts(250, seed=6).draw(40)
    whole = runs.submit(Job(ids, sampling, NEVER))
    runs.wait_ended(whole)
    begun = sampling.max_tokens // 2
    rest = changed(sampling, max_tokens=sampling.max_tokens - begun)
    job = Job([*ids, *whole.ids[:begun]], rest, NEVER, begun_tokens=begun)
    other = runs.submit(job)
    runs.wait_ended(other)
    is_same = "yes" if other.ids == whole.ids[begun:] else "NO"
    report.add(f"a text begun elsewhere goes on the same, {kind}", is_same)
