"""Fits the paced synthetic engine's batch behaviour to a real engine's.

    python -m perf.engine.fit_step_time [--model PATH] [--device cpu|cuda] [--rounds N]

Steps the engine itself, in this process, over a grid of decoding rows and prompt tokens, takes the
median of each point and solves for ``step_ms + row_ms · rows + prompt_token_ms · tokens`` by least
squares on relative errors, so that short steps count as much as long ones.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from catalog.paths import DEMO_CHECKPOINT
from perf.report.stats import median
from worker.core import Job
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.protocol import AbortCause, Sampling
from worker.settings import KvSettings, WorkerSettings

ROWS = (1, 2, 4, 8, 16, 32)
PROMPTS = (0, 32, 128, 384)
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One kind of step: ``rows`` decode, and a prompt of ``prompt_tokens`` is computed beside."""

    rows: int
    prompt_tokens: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of a step in milliseconds, as ``TIDEGATE_WORKER__SYNTHETIC__…`` takes them."""

    step_ms: float
    row_ms: float
    prompt_token_ms: float

    def of(self, rows: int, prompt_tokens: int) -> float:
        return self.step_ms + self.row_ms * rows + self.prompt_token_ms * prompt_tokens


def fit(points: list[StepPoint]) -> Fit:
    """Constants that suit ``points`` best, none below 0."""
    # The prompt's own request is a row too.
    terms = np.array([[1.0, p.rows + (p.prompt_tokens > 0), p.prompt_tokens] for p in points])
    measured = np.array([p.step_ms for p in points])
    solution, *_ = np.linalg.lstsq(terms / measured[:, None], np.ones(len(points)), rcond=None)
    step_ms, row_ms, prompt_token_ms = (max(0.0, float(x)) for x in solution)
    return Fit(step_ms, row_ms, prompt_token_ms)


def measure(engine: Engine, vocab_size: int, rounds: int) -> list[StepPoint]:
    """Time every kind of step, ``rounds`` times each."""
    points = []
    for rows in ROWS:
        running = [_submit(engine, vocab_size, 4, row) for row in range(rows)]
        for _ in range(_WARM_UP_STEPS):
            engine.step()
        for prompt_tokens in PROMPTS:
            taken = []
            for turn in range(rounds):
                extra = [_submit(engine, vocab_size, prompt_tokens, turn)] if prompt_tokens else []
                begun = time.perf_counter()
                engine.step()
                taken.append(1000 * (time.perf_counter() - begun))
                for job in extra:
                    _end(engine, job)
            points.append(StepPoint(rows, prompt_tokens, median(taken)))
        for job in running:
            _end(engine, job)
    return points


def _submit(engine: Engine, vocab_size: int, prompt_tokens: int, salt: int) -> Job:
    ids = [(7919 * (salt + 1) + 31 * i) % (vocab_size - 10) + 5 for i in range(prompt_tokens)]
    sampling = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
    job = Job(ids, sampling, deadline=float("inf"))
    engine.submit(job)
    return job


def _end(engine: Engine, job: Job) -> None:
    engine.cancel(job, AbortCause.CANCEL)
    engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    settings = WorkerSettings(
        model_path=args.model,
        device=args.device,
        kv=KvSettings(prefix_cache=False),
        max_stall_ms=1e6,  # prompts in one piece, whatever they delay
    )
    bundle = build_engine(settings)
    engine = bundle.engine
    assert isinstance(engine, Engine)
    points = measure(engine, bundle.card.vocab_size, args.rounds)
    found = fit(points)
    print(f"{'rows':>5} {'prompt':>7} {'measured ms':>12} {'fitted ms':>10}")
    for p in points:
        fitted = found.of(p.rows + (p.prompt_tokens > 0), p.prompt_tokens)
        print(f"{p.rows:>5} {p.prompt_tokens:>7} {p.step_ms:>12.2f} {fitted:>10.2f}")
    print(f"TIDEGATE_WORKER__SYNTHETIC__STEP_MS={found.step_ms:.3f}")
    print(f"TIDEGATE_WORKER__SYNTHETIC__ROW_MS={found.row_ms:.4f}")
    print(f"TIDEGATE_WORKER__SYNTHETIC__PROMPT_TOKEN_MS={found.prompt_token_ms:.5f}")
    engine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
