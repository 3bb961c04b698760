"""WK-3: the same prompt, parameters and seed give the same tokens in any company."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from protocol import Sampling, TokenLogprob
from tests.support.checkpoints import DEMO, make_checkpoint
from tests.support.engine import ids_of
from tests.support.worker_constants import constants_among
from worker.attention import PackedBatch
from worker.core import Event, Job, JobTokens
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.environment import nested
from worker.errors import NotDeterministic
from worker.runner import build as runner_build
from worker.runner.forward import TiledForward
from worker.sampling import sampler as sampling
from worker.settings import WorkerSettings

SEEDS = range(64)
FAR = 1e12

Answer = tuple[list[int], list[TokenLogprob]]


def build(path: Path = DEMO, *, device: str = "cpu", **changes: object) -> Engine:
    values: dict[str, object] = {"deterministic": True, "max_running": 64}
    if device == "cpu":  # the default depends on the CPU
        values["dtype"] = "float32"
    values |= changes
    with constants_among(values) as stated:
        settings = WorkerSettings(model_path=path, device=device, **nested(stated))
        engine = build_engine(settings).engine
    assert isinstance(engine, Engine)
    return engine


def job_of(seed: int, vocabulary: int = 2048) -> Job:
    """Prompts of 1 to 160 tokens, half of them with a long common head; all kinds of sampling."""
    draw = np.random.default_rng(seed)
    tail = draw.integers(3, vocabulary, int(draw.integers(1, 60))).tolist()
    head = np.random.default_rng(99).integers(3, vocabulary, 100).tolist() if seed % 2 else []
    asked = Sampling(
        max_tokens=3 + seed % 3,
        temperature=float(draw.choice([0.0, 0.7, 1.3])),
        top_p=float(draw.choice([1.0, 0.9])),
        top_k=int(draw.choice([0, 50])),
        min_p=float(draw.choice([0.0, 0.01])),
        repetition_penalty=float(draw.choice([1.0, 1.2])),
        frequency_penalty=float(draw.choice([0.0, 0.3])),
        seed=seed,
        ignore_eos=True,
        logprobs=2,
    )
    return Job(head + tail, asked, FAR)


def run(engine: Engine, jobs: list[Job]) -> list[Answer]:
    """Tokens with their log-probabilities, which differ long before tokens do."""
    for job in jobs:
        engine.submit(job)
    events: list[Event] = engine.step()
    while engine.scheduler.has_work:
        events += engine.step()
    return [(ids_of(job, events), _logprobs_of(job, events)) for job in jobs]


def _logprobs_of(job: Job, events: list[Event]) -> list[TokenLogprob]:
    mine = [e for e in events if isinstance(e, JobTokens) and e.job is job]
    return [logprob for event in mine for logprob in event.logprobs or []]


def run_alone(engine: Engine, seed: int) -> Answer:
    return run(engine, [job_of(seed)])[0]


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Answer]]:
    engine = build(kv__prefix_cache=False)
    yield [run_alone(engine, seed) for seed in SEEDS]
    engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_running": 3, "max_step_tokens": 7, "block_tokens": 4, "kv__blocks": 200}],
    ids=["full batch", "in small chunks, other blocks, smaller pool"],
)
def test_64_seeds_give_the_same_to_the_bit(alone: list[Answer], limits: dict[str, object]) -> None:
    """WK-3: tokens and log-probabilities, with the prefix cache of each other's heads."""
    engine = build(**limits)
    jobs = [job_of(seed) for seed in SEEDS]
    assert run(engine, jobs) == alone
    assert all(
        len(ids) == job.sampling.max_tokens for (ids, _), job in zip(alone, jobs, strict=True)
    )
    engine.stop()


@pytest.mark.slow
def test_64_seeds_give_the_same_from_the_prefix_cache(alone: list[Answer]) -> None:
    """WK-3: prompts whose heads were computed with others, as parts of prompts and as answers."""
    engine = build(max_running=8, max_step_tokens=40)
    run(engine, [job_of(seed) for seed in SEEDS])
    before = engine.stats().cached_tokens_total
    assert run(engine, [job_of(seed) for seed in reversed(SEEDS)]) == alone[::-1]
    prompts = sum(len(job_of(seed).token_ids) for seed in SEEDS)
    assert engine.stats().cached_tokens_total - before > prompts / 2
    engine.stop()


@pytest.mark.slow
def test_or10_texts_go_on_at_another_engine_to_the_bit(alone: list[Answer]) -> None:
    """Cut after any token: greedy, drawn, penalised, where answers count apart from prompts."""
    engine = build(max_running=16)
    cut = [1 + seed % (len(ids) - 1) for seed, (ids, _) in zip(SEEDS, alone, strict=True)]
    rest = []
    for seed, (ids, _) in zip(SEEDS, alone, strict=True):
        job, made = job_of(seed), cut[seed]
        job.sampling = replace(job.sampling, max_tokens=job.sampling.max_tokens - made)
        job.token_ids, job.begun_tokens = [*job.token_ids, *ids[:made]], made
        rest.append(job)
    expected = [(ids[n:], logprobs[n:]) for n, (ids, logprobs) in zip(cut, alone, strict=True)]
    assert run(engine, rest) == expected
    engine.stop()


def test_half_precision_is_deterministic_too() -> None:
    jobs = range(4)
    engine = build(dtype="bfloat16")
    together = run(engine, [job_of(seed) for seed in jobs])
    assert together == [run_alone(engine, seed) for seed in jobs]
    engine.stop()


@pytest.mark.slow
def test_outside_of_the_mode_the_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """WK-3: whatever the logits, the random numbers come from seed and position alone."""
    drawn: dict[tuple[object, object], float] = {}
    real = sampling.uniforms

    def spy(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
        draws = real(seed, position)
        for key, value in zip(zip(seed, position, strict=True), draws, strict=True):
            drawn[key] = value
        return draws

    monkeypatch.setattr(sampling, "uniforms", spy)
    engine = build(deterministic=False, max_running=8, max_step_tokens=19)
    jobs = [job_of(seed) for seed in range(16)]
    run(engine, jobs)
    together, drawn = drawn, {}
    for seed in range(16):
        run(engine, [job_of(seed)])
    assert together == drawn
    warm = [job for job in jobs if job.sampling.temperature]
    assert len(drawn) == sum(job.sampling.max_tokens for job in warm)
    engine.stop()


def test_a_machine_that_cannot_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel whose sums depend on a token's place in the batch."""
    real = TiledForward.hidden

    def sloppy(
        self: TiledForward, batch: PackedBatch, ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        hidden = real(self, batch, ids, positions)
        hidden[::3] *= 1 + 2**-20
        return hidden

    monkeypatch.setattr(TiledForward, "hidden", sloppy)
    with pytest.raises(NotDeterministic, match="DETERMINISTIC=false"):
        build(make_checkpoint(tmp_path), kv__blocks=32)


def test_where_two_threads_are_not_deterministic_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with SmolLM2-135M in float32 on some CPUs."""
    real, before = TiledForward.hidden, torch.get_num_threads()

    def sloppy(self: TiledForward, *batch: Any) -> torch.Tensor:
        hidden = real(self, *batch)
        hidden[::3] *= 1 + 2**-20 * (torch.get_num_threads() > 1)
        return hidden

    monkeypatch.setattr(TiledForward, "hidden", sloppy)
    monkeypatch.setattr(runner_build, "set_threads", lambda *_: torch.set_num_threads(2))
    try:
        build(make_checkpoint(tmp_path), kv__blocks=32)
        assert "computes on one thread: on 2" in caplog.text
    finally:
        torch.set_num_threads(before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_64_seeds_on_cuda() -> None:
    """WK-3."""
    engine = build(device="cuda")
    together = run(engine, [job_of(seed) for seed in SEEDS])
    assert together == [run_alone(engine, seed) for seed in SEEDS]
    chunked = build(device="cuda", max_running=9, max_step_tokens=21)
    assert run(chunked, [job_of(seed) for seed in SEEDS]) == together
