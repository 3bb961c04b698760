"""All measurements of the worker's engine, without Triton (``make bench-engine``).

    python -m perf.engine.gpu [--json PATH] [--device cuda|cpu] [--shape NAME] [--only SECTION …]

It first writes random weights of the shape. A section that fails loses only its own figures.
``--attention`` sets the attention.
``--device cpu --shape 0.5b`` measures a CPU; ``--shape tiny`` tests the logic on any machine.
"""

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, get_args

import numpy as np
import torch

from perf import SEED
from perf.engine.checkpoints import SHAPES, make_checkpoint, roomy_folder
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, result
from perf.report.table import show
from protocol import AbortCause, ModelCard, Sampling
from worker.attention.choice import AttentionSetting
from worker.core import EngineService, Event, Job, JobFinished, JobTokens
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.engine.executor import Executor
from worker.runner import build as runner_build
from worker.runner.cuda_runner import StepMarks
from worker.scheduler.plan import Plan
from worker.settings import BLOCK_TOKENS, KvSettings, WorkerSettings

NEVER: Final = 1e12
"""Deadline that no job reaches."""
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
    """Starts jobs on an engine, and records the time of every event. No two prompts share a
    prefix."""

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
        """Wait until ``holds()`` is true. Raises ``TimeoutError``."""
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
    """Checkpoint and device of a run. ``profile`` is the file for a step's profile; ``card`` is the
    model card of the last engine."""

    path: Path
    device: str
    shape: str
    profile: Path | None = None
    card: ModelCard | None = None

    @contextmanager
    def running(self, **settings: object) -> Iterator[GpuRuns]:
        """An engine with these settings, built as in a worker."""
        given = {"model_path": self.path, "engine": "torch", "device": self.device} | settings
        built = build_engine(WorkerSettings(**given))  # type: ignore[arg-type]
        self.card = built.card
        try:
            yield GpuRuns(built.engine, built.card.vocab_size)
        finally:
            built.engine.stop()


def engine(place: GpuPlace) -> Iterator[Figure]:
    """Measure the model: decodes, prompts."""
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
        yield Figure.of("engine.step_ms", "a step then", "ms", [runs.engine.stats().step_ms])


def _rate(key: str, label: str, rate: float) -> Figure:
    return Figure.of(f"{key}.tokens_per_s", label, "tokens/s", [rate], better="higher")


def _decodes_per_s(runs: GpuRuns, batch: int, keys: int, answer: int) -> float:
    """Tokens per second after each row of a batch has its first token."""
    rows = [runs.submit(runs.prompt(keys - 1), answer) for _ in range(batch)]
    runs.wait_ended(rows)
    begun = max(run.token_times[0] for run in rows)
    times = [at for run in rows for at in run.token_times if at > begun]
    return len(times) / (max(times) - begun)


class WatchedStep(NamedTuple):
    """A launched step: its tokens, the host's time, the number of memory allocations from the
    driver and of those that were retried, and the device's events, if it has a clock."""

    decodes: int
    prompt_tokens: int
    host_ms: float
    taken: int
    retries: int
    marks: StepMarks | None


class StepWatch:
    """Records the steps that an executor launches from now on."""

    def __init__(self, executor: Executor) -> None:
        self.seen: list[WatchedStep] = []
        self.profile: Path | None = None
        """File for a single profile of the next step with prompt tokens and decodes."""
        runner, name = executor.runner, "launch" if executor.launcher is not None else "execute"
        self._plain: Callable[[Plan], object] = getattr(runner, name)
        setattr(runner, name, self._run)

    def _run(self, plan: Plan) -> object:
        prompt = plan.tokens - plan.decodes
        if (file := self.profile) is not None and prompt and plan.decodes:
            self.profile = None
            return self._profiled(plan, file)
        before, began = _allocations(), time.perf_counter()
        step = self._plain(plan)
        host_ms = 1000 * (time.perf_counter() - began)
        taken, retries = (now - old for now, old in zip(_allocations(), before, strict=True))
        marks = getattr(step, "marks", None)
        self.seen.append(WatchedStep(plan.decodes, prompt, host_ms, taken, retries, marks))
        return step

    def _profiled(self, plan: Plan, file: Path) -> object:
        with torch.profiler.profile() as found:
            step = self._plain(plan)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        order = ("cpu_time_total", "self_device_time_total")
        tables = (found.key_averages().table(sort_by=by, row_limit=40) for by in order)
        file.write_text("\n".join(tables))
        return step


def _allocations() -> tuple[int, int]:
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return stats.get("num_device_alloc", 0), stats.get("num_alloc_retries", 0)


def steps(place: GpuPlace) -> Iterator[Figure]:
    """Steps by kind: launch, device time, memory taken; prompts together with decodes."""
    tiny = place.shape == "tiny"
    sizes, beside, keys, answer = ((16,), 2, 20, 60) if tiny else ((512, 2048), 24, 1500, 1000)
    for size in sizes:
        blocks = -(-(beside * (keys + answer) + 6 * (size + 16)) // BLOCK_TOKENS) + 64
        kv = KvSettings(blocks=blocks)
        chosen = {"max_running": 8 if tiny else 64, "max_step_tokens": size, "kv": kv}
        with place.running(**chosen) as runs:
            assert isinstance(runs.engine, Engine)
            watch = StepWatch(runs.engine.executor)
            for decodes in (0, beside):
                held = [runs.submit(runs.prompt(keys), answer) for _ in range(decodes)]
                runs.wait(lambda rows=held: all(run.token_times for run in rows))  # type: ignore[misc]
                since = len(watch.seen)
                rows = [runs.submit(runs.prompt(size), 2) for _ in range(6)]
                runs.wait_ended(rows)
                took_s = max(run.token_times[0] for run in rows) - rows[0].submitted_at
                yield from _told(f"steps.{size}.{decodes}", watch.seen[since:], 6 * size / took_s)
                if decodes and size == sizes[0]:
                    watch.profile = place.profile
                    runs.wait_ended([runs.submit(runs.prompt(size), 2)])
                for run in held:
                    runs.engine.cancel(run.job, AbortCause.CANCEL)
                runs.wait_ended(held)


def _told(key: str, seen: Sequence[WatchedStep], rate: float) -> Iterator[Figure]:
    _, size, decodes = key.split(".")
    what = f"prompts of {size} with {decodes} decodes"
    yield _rate(f"{key}.prompts", what, rate)
    for kind in ("prompt", "decode"):
        steps = [one for one in seen if bool(one.prompt_tokens) == (kind == "prompt")]
        times = [1000 * one.marks.time().busy_s for one in steps if one.marks is not None]
        launches = [one.host_ms for one in steps]
        for name, unit, values in (
            ("launch", "ms", launches),
            ("first_launch", "ms", launches[:1]),
            ("device", "ms", times),
            ("taken", "", [float(one.taken) for one in steps]),
            ("retries", "", [float(one.retries) for one in steps]),
        ):
            if values:
                label = f"{what}: a step's {name} ({kind})"
                yield Figure.of(f"{key}.{kind}_{name}", label, unit, values)
        if launches:
            label = f"{what}: a step's launch, p90 ({kind})"
            yield Figure.tail_of(f"{key}.{kind}_launch_p90", label, "ms", launches, 90)


SECTIONS: Final = {"engine": engine, "steps": steps}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; returns 0 when none failed, else 1."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no usable GPU; --device cpu --shape 0.5b")
    recording = begin(parser, options, "perf.engine.gpu", *given, seed=SEED)
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="tidegate-gpu-", dir=roomy_folder()))
    vars(runner_build)["ATTENTION"] = options.attention  # a constant, not a setting
    place = GpuPlace(scratch / "model", options.device, options.shape, options.profile)
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
        "--shape", choices=tuple(SHAPES), default="8b", help="of the model; tiny for tests"
    )
    kinds = get_args(AttentionSetting)
    parser.add_argument("--attention", choices=kinds, default="auto", help="of the engine (auto)")
    names = tuple(SECTIONS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these sections")
    parser.add_argument("--profile", type=Path, help="file for the profile of a step (steps)")
    parser.add_argument(
        "--scratch", help="directory for a checkpoint, kept; 17 GB (else in /dev/shm if it fits)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
