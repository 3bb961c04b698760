"""Section ``swap``: a model is loaded beside one that serves, as in a worker's swap."""

import gc
import time
from pathlib import Path

import torch

from perf.engine.bare_engine import Built, build, load
from perf.engine.gpu_parts import make_large
from perf.engine.runs import EngineRun, Prompts, Runs, Stepping, greedy
from perf.engine.timing import synchronize
from perf.report.rows import Report


def swap(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Load the large model a second time beside decodes of the first: what these notice of it, and
    whether the first one's memory comes back."""
    path = scratch / "large"
    if not (path / "config.json").exists():
        make_large(report, path, tiny=tiny)
    texts, prompt, answer = (2, 8, 60) if tiny else (8, 512, 1500)
    blocks = texts * (-(-(prompt + answer) // 16) + 1)

    def built() -> Built:
        return build(*load(path, device), device, max_running=texts, blocks=blocks)

    first = built()
    memory = _allocated(device)
    alone = _submit(runs := Runs(first.engine), texts, prompt, answer)
    runs.step_until_idle()
    with Stepping(first.engine) as running:
        beside = _submit(running, texts, prompt, answer)
        running.wait_for(lambda: all(run.ids for run in beside), 30)
        started = time.perf_counter()
        second = built()
        synchronize(device)
        ended = time.perf_counter()
        running.wait(beside, max(5.0, report.left_s - 10))
    report.add("load beside decodes", ended - started, "s", f"{texts} texts went on meanwhile")
    gaps = [
        gap
        for run in beside
        for at, gap in zip(run.token_times[1:], run.gaps_s, strict=True)
        if started <= at <= ended
    ]
    usual = max(gap for run in alone for gap in run.gaps_s)
    note = f"{usual * 1e3:.1f} ms with nothing beside"
    report.add("longest time between tokens", max(gaps, default=0.0) * 1e3, "ms", note)
    same = sum(a.ids == b.ids for a, b in zip(alone, beside, strict=True))
    report.add("equal to what is made with nothing beside", f"{same}/{texts}", "texts", "greedy")
    # In the same company: in half precision a prompt that is computed alone may give other tokens.
    again = _submit(runs := Runs(second.engine), texts, prompt, 16)
    runs.step_until_idle()
    right = sum(a.ids == b.ids[:16] for a, b in zip(again, alone, strict=True))
    report.add("the second model's first tokens are the first one's", f"{right}/{texts}", "texts")
    first.engine.stop()
    del first, running
    gc.collect()
    left = (_allocated(device) - memory) / 2**20
    report.add("memory beyond one model's, once the first has gone", left, "MiB")
    second.engine.stop()


def _submit(runs: Runs, texts: int, prompt: int, answer: int) -> list[EngineRun]:
    prompts = Prompts(250, seed=13)
    return [runs.submit(greedy(prompts.draw(prompt), answer)) for _ in range(texts)]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
