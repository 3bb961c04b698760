"""Stage times and memory of the slot pipeline's production providers on a GPU, without weights.

    python -m perf.slot.gpu [--device cuda|cpu] [--tiny] [--only NAME …] [--json PATH]

Models of the published shapes with random weights (``random_models``): what they take and how long
is the same, what they draw is not. Needs torch, and tidegate[slot-clip,slot-flux] for the check and
the portrait; what is not installed is a row that says so. Speech by Kokoro is not among them: how
long its sound gets depends on its weights. ``--tiny`` runs anywhere; its figures mean nothing.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from clips.plan.plan import ClipPlan
from clips.plan.recipe import Portrait, Recipe
from clips.render.check import KEYFRAMES
from clips.render.stages.base import Provider
from clips.render.stages.flux import FluxOptions, FluxPrecision
from perf.report.recording import DirtyTree, Recording
from perf.report.rows import Report, read_rows, table
from perf.report.stats import median
from perf.slot import random_models

_GB = 1_000_000_000
_LIMIT_S = 560.0
_ROUNDS = 3
SECTIONS = ("video", "check", "portrait nf4", "portrait fp8", "portrait bf16")


class ProviderBench:
    """One section's providers, measured one after the other."""

    def __init__(self, report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
        self._report = report
        self._device = device
        self._scratch = scratch
        self._tiny = tiny

    def video(self) -> None:
        """Measure LivePortrait at 512 pixels: the 360 frames of 15 s, in both of its halves'
        precisions."""
        plan = ClipPlan(0.5 if self._tiny else 15.0, 12 if self._tiny else 24, 512, False)
        size = 64 if self._tiny else plan.size
        device = self._device
        audio = torch.rand(plan.samples, device=device) - 0.5
        actor = torch.rand(3, size, size, device=device)
        frames = torch.zeros(plan.frames, 3, size, size, dtype=torch.uint8, device=device)
        for precision in ("fp16", "fp32") if device.type == "cuda" else ("fp32",):
            provider = random_models.liveportrait(device, precision, tiny=self._tiny)
            self._measure(
                f"liveportrait {precision}, {plan.frames} frames",
                provider,
                lambda provider=provider: provider.render(  # type: ignore[misc]
                    plan, actor, audio, frames, _on
                ),
            )
            provider.close()

    def check(self) -> None:
        """Measure both CLIP models on five keyframes."""
        size = 64 if self._tiny else 512
        frames = torch.randint(
            0, 255, (KEYFRAMES, 3, size, size), dtype=torch.uint8, device=self._device
        )
        precision = "fp16" if self._device.type == "cuda" else "fp32"
        provider = random_models.clip(
            self._device,
            precision,  # type: ignore[arg-type]
            self._scratch,
            tiny=self._tiny,
        )
        self._measure(
            f"clip {precision}, {KEYFRAMES} keyframes",
            provider,
            lambda: provider.score("a friendly host with red hair", frames, _on),
        )
        provider.close()

    def portrait(self, precision: FluxPrecision) -> None:
        """Measure FLUX, 4 steps at 512 pixels: with words that it knows, then with new ones each
        time."""
        size = 64 if self._tiny else 512
        options = FluxOptions(precision, least_size=64 if self._tiny else 256)
        provider = random_models.flux(self._device, options, tiny=self._tiny)
        actor = torch.zeros(3, size, size, device=self._device)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        known = Recipe("1.0", "Hi", portrait=Portrait("a friendly host"))
        self._measure(
            f"flux {precision}, {size} pixels, known prompt",
            provider,
            lambda: provider.render(known, actor, _on),
        )
        self._measure(
            f"flux {precision}, {size} pixels, new prompt",
            provider,
            lambda: provider.render(
                Recipe("1.0", "Hi", portrait=Portrait(next(letters))), actor, _on
            ),
        )
        provider.close()

    def _measure(self, what: str, provider: Provider, work: Callable[[], object]) -> None:
        """Report bytes that stay, bytes on top, and the time of one ``work``, after one to warm
        up."""
        kept = sum(each.bytes for each in provider.residents())
        self._report.add(f"{what}: stays", kept / _GB, "GB")
        is_cuda = self._device.type == "cuda"
        times = []
        with torch.inference_mode():
            work()
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if is_cuda else 0
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                work()
                if is_cuda:
                    torch.cuda.synchronize()
                times.append(1000 * (time.perf_counter() - began))
        if is_cuda:
            peak = torch.cuda.max_memory_allocated() - before
            self._report.add(f"{what}: on top", peak / _GB, "GB", "at its most")
        spread = f"median of {_ROUNDS}, {min(times):,.0f} to {max(times):,.0f}"
        self._report.add(f"{what}: time", median(times), "ms", spread)


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; returns 0 when each ran to its end."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="perf.slot.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: tries the script itself")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--json", type=Path, help="save a bundle there")
    parser.add_argument("--allow-dirty", action="store_true")
    options = parser.parse_args(given)
    try:
        recording = Recording.begin(
            ["perf.slot.gpu", *given], options.json, allow_dirty=options.allow_dirty
        )
    except DirtyTree as error:
        parser.error(str(error))
    device = torch.device(options.device)
    ends_at = time.monotonic() + _LIMIT_S
    with tempfile.TemporaryDirectory(prefix="tidegate-slot-gpu-") as folder:
        scratch = Path(folder)
        file = scratch / "rows.jsonl"
        for name in options.only:
            report = Report(name, file, ends_at=ends_at)
            bench = ProviderBench(report, device, scratch, tiny=options.tiny)
            kind, _, precision = name.partition(" ")
            report.attempt(name, _section(bench, kind, precision))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rows = read_rows(file)
    complete = not any(row.value in ("FAILED", "left out") for row in rows)
    print("\n" + table(rows))
    recording.save(
        recording.facts() | {"complete": complete, "rows": [asdict(row) for row in rows]}
    )
    return 0 if complete else 1


def _section(bench: ProviderBench, kind: str, precision: str) -> Callable[[], None]:
    if kind == "portrait":
        return lambda: bench.portrait(precision)  # type: ignore[arg-type]
    return bench.video if kind == "video" else bench.check


def _on(_done: float) -> None:
    """Progress callback that lets every step go on."""


if __name__ == "__main__":
    sys.exit(main())
