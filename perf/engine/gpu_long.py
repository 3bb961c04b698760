"""Section ``long``: texts of up to 128k tokens, alone and among short ones."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from perf.engine.bare_engine import Built, build, load
from perf.engine.checkpoints import ModelShape
from perf.engine.gpu_parts import make_large, recorded_ms
from perf.engine.runs import Prompts, Runs, greedy
from perf.engine.timing import copy_gb_per_s
from perf.report.rows import Report
from perf.report.stats import median
from protocol import AbortCause


def long(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Measure first tokens by length, and decodes whose texts differ a hundredfold in length."""
    path = scratch / "large"
    if not (path / "config.json").exists():
        make_large(report, path, tiny=tiny)
    longest, short, rows = (200, 20, 4) if tiny else (131_072, 1024, 64)
    model, config = load(path, device)
    longest = min(longest, config.context_tokens)
    blocks = -(-longest // 16) + rows * (-(-short // 16) + 8) + 16
    built = build(model, config, device, max_running=rows, blocks=blocks, max_step_tokens=2048)
    report.add("attention in use", built.attention.name)
    copy = copy_gb_per_s(device, 2**20 if tiny else 2 * 2**30)
    for many in (rows, rows // 2):
        for contexts in ([short] * many, [*[short] * (many - 1), longest - 16]):
            report.attempt(
                f"decode {many} rows",
                lambda c=contexts: _decode(report, built, ModelShape.of(path), c, copy),  # type: ignore[misc]
            )
    for tokens in (128, 256, 512, 1024, 2048, longest // 16, longest // 4, longest - 16):
        if tokens > longest:
            continue
        report.attempt(
            f"first token of {tokens}",
            lambda n=tokens: _first_token(report, built, n, config.vocab_size, tiny=tiny),  # type: ignore[misc]
        )
    report.attempt("stop", built.engine.stop)


def _decode(
    report: Report, built: Built, shape: ModelShape, contexts: Sequence[int], copy_gb_s: float
) -> None:
    what = f"decode {len(contexts)} rows of {contexts[0]}"
    if contexts[-1] != contexts[0]:
        what = f"decode {len(contexts) - 1} rows of {contexts[0]} and 1 of {contexts[-1]}"
    ms = recorded_ms(built, contexts)
    if ms is None:
        report.add(what, "left out", note="nothing is recorded here")
        return
    nbytes = shape.step_bytes + sum(contexts) * shape.kv_token_bytes
    bound_ms = nbytes / copy_gb_s / 1e6
    report.add(what, ms, "ms", f"{bound_ms:.1f} ms by its bytes at the copy's bandwidth")


def _first_token(report: Report, built: Built, tokens: int, vocabulary: int, *, tiny: bool) -> None:
    """Time one prompt alone, then a long one beside decodes, and their longest step meanwhile."""
    engine = built.engine
    prompts, runs = Prompts(vocabulary, seed=tokens), Runs(engine)
    times = []
    for _ in range(1 if tokens > 4000 else 5):
        alone = runs.submit(greedy(prompts.draw(tokens), 1))
        runs.step_until_idle()
        times.append(alone.ttft_s * 1e3)
    note = f"alone, {tokens / median(times) * 1e3:,.0f} tokens/s"
    report.add(f"first token of {tokens}", median(times), "ms", note)
    if not 4000 < tokens < 40_000 and not tiny:
        return
    beside = built.engine.scheduler.config.max_running // 4
    others = [runs.submit(greedy(prompts.draw(8), 800)) for _ in range(beside)]
    for _ in range(24):
        runs.step()
    probe, longest_s = runs.submit(greedy(prompts.draw(tokens), 1)), 0.0
    while probe.finished is None:
        started = time.monotonic()
        runs.step()
        longest_s = max(longest_s, time.monotonic() - started)
    note = f"beside {beside} decodes, whose longest step was {longest_s * 1e3:.0f} ms"
    report.add(f"first token of {tokens}, not alone", probe.ttft_s * 1e3, "ms", note)
    for run in others:
        engine.cancel(run.job, AbortCause.CANCEL)
    runs.step_until_idle()
