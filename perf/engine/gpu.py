"""Every measurement of the worker's engine, without Triton around it (``make bench-engine``).

    python -m perf.engine.gpu [--json PATH] [--device cuda|cpu] [--shape NAME] [--only SECTION …]

Random weights of the shape are written first. A section that fails costs its own figures only.
``--device cpu --shape 0.5b`` measures a CPU; with ``--shape tiny`` its logic runs anywhere.
"""

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch

from perf import SEED
from perf.engine.checkpoints import SHAPES, make_checkpoint, roomy_folder
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, result
from perf.report.table import show
from protocol import AbortCause, ModelCard, Sampling
from worker.core import EngineService, Event, Job, JobFinished, JobTokens
from worker.engine.build import build_engine
from worker.models.config import read_config
from worker.settings import BLOCK_TOKENS, KvSettings, WorkerSettings

NEVER: Final = 1e12
"""Deadline that no job lasts until."""
_PATIENCE_S: Final = 300.0
_GREEDY: Final = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class EngineRun:
    """One job: when it was submitted, when its tokens came, how it ended. Seconds."""

    job: Job
    submitted_at: float
    token_times: list[float] = field(default_factory=list)
    finished: JobFinished | None = None


class GpuRuns:
    """Jobs of an engine, which this starts, with the time of every event. No two of their prompts
    begin alike."""

    def __init__(self, engine: EngineService, vocab_size: int) -> None:
        self.engine = engine
        self._rng = np.random.default_rng(SEED)
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        self._runs: dict[int, EngineRun] = {}
        engine.start(self._take)

    def prompt(self, tokens: int) -> list[int]:
        ids: list[int] = self._rng.integers(10, self._vocab_size, tokens).tolist()
        return ids

    def submit(
        self, prompt: Sequence[int], tokens: int, *, session: str = "", **sampling: float
    ) -> EngineRun:
        """A job of exactly ``tokens``, greedy unless ``sampling`` says otherwise."""
        drawn = Sampling(max_tokens=tokens, **(_GREEDY | sampling))  # type: ignore[arg-type]
        job = Job(prompt, drawn, NEVER, session=session)
        run = EngineRun(job, time.perf_counter())
        with self._changed:
            self._runs[id(job)] = run
        self.engine.submit(job)
        return run

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds. Raises ``TimeoutError``."""
        with self._changed:
            if not self._changed.wait_for(holds, _PATIENCE_S):
                raise TimeoutError(f"the engine was not done after {_PATIENCE_S:g} s")

    def wait_ended(self, runs: Sequence[EngineRun]) -> None:
        self.wait(lambda: all(run.finished is not None for run in runs))

    def _take(self, events: list[Event]) -> None:
        now = time.perf_counter()
        with self._changed:
            for event in events:
                run = self._runs[id(event.job)]
                if isinstance(event, JobTokens):
                    run.token_times += [now] * len(event.ids)
                elif isinstance(event, JobFinished):
                    run.finished = event
            self._changed.notify_all()


@dataclass(slots=True)
class GpuPlace:
    """Where a run measures: a checkpoint, and a device. ``card`` is that of the last engine."""

    path: Path
    device: str
    shape: str
    card: ModelCard | None = None

    @contextmanager
    def running(self, **settings: object) -> Iterator[GpuRuns]:
        """An engine of these settings, as a worker builds it."""
        given = {"model_path": self.path, "engine": "torch", "device": self.device} | settings
        built = build_engine(WorkerSettings(**given))  # type: ignore[arg-type]
        self.card = built.card
        try:
            yield GpuRuns(built.engine, built.card.vocab_size)
        finally:
            built.engine.stop()


def loader(place: GpuPlace) -> Iterator[Figure]:
    """Load as a worker does by default, and run a full batch; what is left of the memory then."""
    torch.zeros(1, device=place.device)  # starts CUDA
    started = time.monotonic()
    with place.running() as runs:
        seconds, free = time.monotonic() - started, _free_gib(place)
        yield Figure.of("loader.worker_s", "as a worker loads it, page cache warm", "s", [seconds])
        assert place.card is not None
        length = min(600, place.card.context_tokens // 2)
        rows = [
            runs.submit(runs.prompt(length), 40, temperature=0.8, top_p=0.9, logprobs=5)
            for _ in range(place.card.max_running)
        ]
        runs.wait_ended(rows)
        for when, gib in (("loaded", free), ("full_batch", _free_gib(place))):
            label = f"device memory left, {when.replace('_', ' ')}"
            yield Figure.of(f"loader.{when}_gib", label, "GiB", [gib], better="higher")


def _free_gib(place: GpuPlace) -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if place.device == "cuda" else 0.0


def engine(place: GpuPlace) -> Iterator[Figure]:
    """Measure the model: decodes, prompts, cancels."""
    tiny = place.shape == "tiny"
    batches, keys, answer = ((1, 2, 4), 40, 10) if tiny else ((1, 8, 32, 64), 1024, 96)
    most = max(batches)
    blocks = most * -(-(keys + answer) // BLOCK_TOKENS) + 16
    sizes = {"max_running": most, "max_step_tokens": 2048, "kv": KvSettings(blocks=blocks)}
    with place.running(**sizes) as runs:
        for batch in batches:
            label = f"{batch} rows of {keys} tokens"
            rate = _decodes_per_s(runs, batch, keys, answer)
            yield _rate(f"engine.decode.{batch}", label, rate)
        count = min(16, most)
        rows = [runs.submit(runs.prompt(keys), 1) for _ in range(count)]
        runs.wait_ended(rows)
        took_s = max(run.token_times[0] for run in rows) - rows[0].submitted_at
        yield _rate("engine.prefill", f"{count} prompts of {keys}", count * keys / took_s)
        freed = _cancels_ms(runs, most // 2, keys, 3 if tiny else 25)
        label = f"cancel to blocks free beside {most // 2} jobs"
        yield Figure.of("engine.cancel_ms", label, "ms", freed)
        yield Figure.of("engine.step_ms", "a step then", "ms", [runs.engine.stats().step_ms])


def _rate(key: str, label: str, rate: float) -> Figure:
    return Figure.of(f"{key}.tokens_per_s", label, "tokens/s", [rate], better="higher")


def _decodes_per_s(runs: GpuRuns, batch: int, keys: int, answer: int) -> float:
    """Tokens per second once each row of a batch has its first."""
    rows = [runs.submit(runs.prompt(keys - 1), answer) for _ in range(batch)]
    runs.wait_ended(rows)
    begun = max(run.token_times[0] for run in rows)
    times = [at for run in rows for at in run.token_times if at > begun]
    return len(times) / (max(times) - begun)


def _cancels_ms(runs: GpuRuns, beside: int, keys: int, count: int) -> list[float]:
    """Time of each cancel until slot and blocks are free, with the device quiescent."""
    draw, freed = random.Random(SEED), list[float]()
    others = [runs.submit(runs.prompt(8), keys) for _ in range(beside)]
    for _ in range(count):
        run = runs.submit(runs.prompt(min(keys // 2, 200)), keys)
        # Somewhere within it, on a machine whose steps take next to nothing as well.
        about_s = keys * runs.engine.stats().step_ms / 4000
        time.sleep(min(0.01 + 0.05 * draw.random(), about_s))
        runs.engine.cancel(run.job, AbortCause.CANCEL)
        runs.wait_ended([run])
        if run.finished is not None and run.finished.abort_ms is not None:
            freed.append(run.finished.abort_ms)
    for run in others:
        runs.engine.cancel(run.job, AbortCause.CANCEL)
    runs.wait_ended(others)
    return freed


def resume(place: GpuPlace) -> Iterator[Figure]:
    """First token of a conversation after a restart: from disk, and computed again (WK-6)."""
    tokens = min(8192, read_config(place.path).context_tokens - 16)
    disk = KvSettings(disk_path=place.path.parent / "kv")
    said: list[int] = []
    for key, what in (("computed", "computed"), ("from_disk", "from disk")):
        with place.running(kv=disk) as runs:
            runs.wait_ended([runs.submit(runs.prompt(64), 2)])
            said = [*said, 11, 12, 13] if said else runs.prompt(tokens)
            run = runs.submit(said, 1, session="s")
            runs.wait_ended([run])
        assert run.finished is not None
        cached = f"{run.finished.cached_tokens} of {len(said)} tokens cached"
        took_ms = 1000 * (run.token_times[0] - run.submitted_at)
        yield Figure.of(f"resume.{key}_ms", f"first token, {what} ({cached})", "ms", [took_ms])


SECTIONS: Final = {"loader": loader, "engine": engine, "resume": resume}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; returns 0 when none failed, else 1."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no usable GPU; --device cpu --shape 0.5b")
    recording = begin(parser, options, "perf.engine.gpu", *given, seed=SEED)
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="tidegate-gpu-", dir=roomy_folder()))
    place = GpuPlace(scratch / "model", options.device, options.shape)
    results: list[BenchResult] = []
    try:
        if not (place.path / "config.json").exists():
            make_checkpoint(place.path, SHAPES[options.shape], seed=0)
        for name in options.only:
            with result(results, name, SECTIONS[name].__doc__ or "") as figures:
                figures.extend(SECTIONS[name](place))
    finally:
        if not options.scratch:
            shutil.rmtree(scratch, ignore_errors=True)
    bundle = recording.bundle(results, place.card)
    show(bundle, new_console())
    recording.save(bundle)
    return int(any(one.failed for one in results))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="8b", help="of the model; tiny: tries"
    )
    names = tuple(SECTIONS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these sections")
    parser.add_argument(
        "--scratch", help="directory for a checkpoint, kept; 17 GB (else in /dev/shm if it fits)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
