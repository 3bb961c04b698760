"""Measurements of an engine. Every part warms up, repeats, and pairs what it compares."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from perf.engine.bandwidth import Bandwidth
from perf.engine.baseline import Baseline
from perf.engine.checkpoints import drop_page_cache
from perf.engine.rig import EngineRig, run_beside
from perf.engine.runs import EngineRun
from perf.report.bundle import Figure
from perf.report.stats import median
from protocol import AbortCause

_PROMPT_TOKENS: Final = 32
_MIXED_DECODES: Final = 16


@dataclass(frozen=True, slots=True)
class Amount:
    """Amount to measure."""

    repeats: int
    new_tokens: int
    prompt_tokens: int
    """Length of the long prompts."""
    batches: tuple[int, ...]


@dataclass(frozen=True)
class EngineBench:
    """Common things of the parts: a checkpoint, an engine on it, and a directory for their
    files."""

    checkpoint: Path
    device: str
    rig: EngineRig
    load: Amount
    scratch: Path
    settings: dict[str, object]


def decode(bench: EngineBench) -> list[Figure]:
    """Whole runs beside ``generate`` in turns; steps against the read bandwidth."""
    model = bench.rig.model
    baseline = run_beside(lambda: Baseline(bench.checkpoint, bench.device, model.dtype))
    bandwidth = Bandwidth(bench.device)
    figures = []
    for batch in bench.load.batches:
        ours, theirs, ratios, steps, shares = [], [], [], [], []
        for i in range(bench.load.repeats + 1):
            prompts = [bench.rig.prompts.draw(_PROMPT_TOKENS) for _ in range(batch)]
            bandwidth.sample()
            runs = _together(bench.rig, prompts, bench.load.new_tokens)
            bandwidth.sample()
            seconds = _ended(runs) - min(run.submitted_at for run in runs)
            baseline_seconds = _generate(bench, baseline, prompts)
            if i == 0:  # warm-up
                continue
            tokens = batch * bench.load.new_tokens
            ours.append(tokens / seconds)
            theirs.append(tokens / baseline_seconds)
            ratios.append(baseline_seconds / seconds)
            step = median([gap for run in runs for gap in run.gaps_s[1:]])
            steps.append(step)
            shares.append(model.step_bytes / step / median(bandwidth.samples[-2:]))
        at, label = f"decode.b{batch}", f"batch {batch}"
        figures += [
            _higher(f"{at}.tokens_per_s", f"{label}", "tokens/s", ours),
            _higher(f"{at}.generate_tokens_per_s", f"{label}: generate", "tokens/s", theirs),
            _higher(f"{at}.ratio", f"{label}: × generate", "", ratios),
            Figure.of(f"{at}.step_ms", f"{label}: step", "ms", [s * 1e3 for s in steps]),
            _higher(
                f"{at}.bandwidth_share", f"{label}: weights read, of the bandwidth", "", shares
            ),
        ]
    samples = [sample / 1e9 for sample in bandwidth.samples]
    verb = "copied" if bench.device == "cuda" else "read"
    return [_higher("bandwidth.gb_per_s", f"memory {verb}", "GB/s", samples), *figures]


def prefill(bench: EngineBench) -> list[Figure]:
    """One long prompt by itself."""
    rates = []
    for i in range(bench.load.repeats + 1):
        run = bench.rig.ask(bench.rig.prompts.draw(bench.load.prompt_tokens), 1)
        if i:
            rates.append(bench.load.prompt_tokens / run.ttft_s)
    name = f"prompt of {bench.load.prompt_tokens}"
    return [_higher("prefill.tokens_per_s", name, "tokens/s", rates)]


def mixed(bench: EngineBench) -> list[Figure]:
    """A long prompt while decodes run: its first token, and what it does to their gaps."""
    alone, firsts, before, during, worst = [], [], [], [], []
    for i in range(bench.load.repeats + 1):
        rig = bench.rig
        lone = rig.ask(rig.prompts.draw(bench.load.prompt_tokens), 1)
        decodes = [
            rig.submit(rig.prompts.draw(_PROMPT_TOKENS), 10 * bench.load.new_tokens)
            for _ in range(_MIXED_DECODES)
        ]
        rig.wait(*decodes, tokens=bench.load.new_tokens // 2)
        late = rig.ask(rig.prompts.draw(bench.load.prompt_tokens), 1)
        for run in decodes:
            rig.engine.cancel(run.job, AbortCause.CANCEL)
        rig.wait_ended(*decodes)
        if i == 0:
            continue
        alone.append(lone.ttft_s)
        firsts.append(late.ttft_s)
        quiet = [gap for run in decodes for gap in _gaps(run, 0, late.submitted_at)]
        busy = [gap for run in decodes for gap in _gaps(run, late.submitted_at, _ended([late]))]
        before.append(median(quiet))
        during.append(median(busy))
        worst.append(max(busy))
    prompt = f"prompt of {bench.load.prompt_tokens}"

    def ms(key: str, label: str, values: list[float]) -> Figure:
        return Figure.of(f"mixed.{key}_ms", label, "ms", [value * 1e3 for value in values])

    return [
        ms("ttft_alone", f"{prompt}: first token, alone", alone),
        ms("ttft", f"{prompt}: first token beside {_MIXED_DECODES} decodes", firsts),
        ms("gap_before", "gap between their tokens before", before),
        ms("gap_during", "gap between their tokens meanwhile", during),
        ms("gap_worst", "the longest gap meanwhile", worst),
    ]


def prefix(bench: EngineBench) -> list[Figure]:
    """A prompt whose beginning is cached against one that is new."""
    cold, hit, ratios = [], [], []
    for i in range(bench.load.repeats + 1):
        ids = bench.rig.prompts.draw(bench.load.prompt_tokens)
        new = bench.rig.ask(ids, 1)
        again = bench.rig.ask([*ids, *bench.rig.prompts.draw(8)], 1)
        _expect_cached(again)
        if i:
            cold.append(new.ttft_s * 1e3)
            hit.append(again.ttft_s * 1e3)
            ratios.append(again.ttft_s / new.ttft_s)
    prompt = f"prompt of {bench.load.prompt_tokens}"
    return [
        Figure.of("prefix.cold_ms", f"{prompt}, new: first token", "ms", cold),
        Figure.of("prefix.hit_ms", f"{prompt}, cached: first token", "ms", hit),
        Figure.of("prefix.ratio", "cached ÷ new", "", ratios),
    ]


def resume(bench: EngineBench) -> list[Figure]:
    """After a restart: a conversation's first token from disk against its recomputation."""
    computed, resumed, ratios, tokens = [], [], [], []
    for i in range(bench.load.repeats):
        disk = bench.scratch / f"kv-{i}"
        settings = bench.settings | {"kv__disk_path": disk}
        with EngineRig(bench.checkpoint, bench.device, **settings) as rig:
            _warm(rig)
            ids = rig.prompts.draw(bench.load.prompt_tokens)
            fresh = rig.ask(ids, 1, session="s")
        with EngineRig(bench.checkpoint, bench.device, **settings) as rig:
            _warm(rig)
            again = rig.ask([*ids, 11, 12, 13], 1, session="s")
        shutil.rmtree(disk)
        assert again.finished is not None
        computed.append(fresh.ttft_s * 1e3)
        resumed.append(again.ttft_s * 1e3)
        ratios.append(again.ttft_s / fresh.ttft_s)
        tokens.append(float(again.finished.cached_tokens))
    prompt = f"prompt of {bench.load.prompt_tokens}"
    return [
        Figure.of("resume.recompute_ms", f"{prompt}, recomputed: first token", "ms", computed),
        Figure.of("resume.disk_ms", f"{prompt}, from disk: first token", "ms", resumed),
        Figure.of("resume.ratio", "from disk ÷ recomputed", "", ratios),
        _higher("resume.tokens", "tokens that came from disk", "", tokens),
    ]


def load(bench: EngineBench) -> list[Figure]:
    """A start by phase, with the files in the page cache and without."""
    figures = []
    for name, label in (("cold", "files on disk"), ("hot", "files in the page cache")):
        starts: list[dict[str, float]] = []
        for _ in range(bench.load.repeats):
            if name == "cold":
                drop_page_cache(bench.checkpoint)
            with EngineRig(bench.checkpoint, bench.device, **bench.settings) as rig:
                starts.append(dict(rig.loaded.load_ms))
        for phase in starts[0]:
            values = [start[phase] for start in starts]
            figures.append(Figure.of(f"load.{name}.{phase}_ms", f"{label}: {phase}", "ms", values))
    return figures


PARTS: Final[dict[str, Callable[[EngineBench], list[Figure]]]] = {
    "decode": decode,
    "prefill": prefill,
    "mixed": mixed,
    "prefix": prefix,
    "resume": resume,
    "load": load,
}


def _together(rig: EngineRig, prompts: list[list[int]], tokens: int) -> list[EngineRun]:
    runs = [rig.submit(prompt, tokens) for prompt in prompts]
    rig.wait(*runs)
    return runs


def _ended(runs: list[EngineRun]) -> float:
    return max(run.token_times[-1] for run in runs)


def _gaps(run: EngineRun, begin: float, end: float) -> list[float]:
    """Gaps between tokens whose later one came from ``begin`` to ``end``, in seconds."""
    later = run.token_times[2:]  # the first gap holds the rest of the others' prompts
    pairs = zip(run.token_times[1:], later, strict=False)
    return [after - before for before, after in pairs if begin <= after <= end]


def _expect_cached(run: EngineRun) -> None:
    if run.finished is None or not run.finished.cached_tokens:
        raise RuntimeError("the prompt was not in the prefix cache; nothing to compare")


def _warm(rig: EngineRig) -> None:
    rig.ask(rig.prompts.draw(rig.engine.scheduler.config.max_step_tokens), 2)


def _generate(bench: EngineBench, baseline: Baseline, prompts: list[list[int]]) -> float:
    """Seconds of ``generate`` with a thread per core, whatever the engine chose for a small
    model."""
    chosen = torch.get_num_threads()

    def call() -> float:
        if bench.device == "cpu":
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            return baseline.generate(prompts, bench.load.new_tokens)
        finally:
            torch.set_num_threads(chosen)

    return run_beside(call)


def _higher(key: str, label: str, unit: str, values: list[float]) -> Figure:
    return Figure.of(key, label, unit, values, better="higher")
