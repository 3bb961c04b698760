"""The whole engine on a real model, stepped by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol import Sampling
from tests.support.checkpoints import DEMO
from tests.support.engine import end_of, ids_of
from tests.support.lazy import transformers
from tests.support.worker_constants import constants_among
from worker.core import Event, Job
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.environment import nested
from worker.settings import WorkerSettings

FAR = 1e12


def build(path: Path, device: str = "cpu", **changes: object) -> Engine:
    values = {"block_tokens": 4, "max_running": 8, "max_step_tokens": 16} | changes
    with constants_among(values) as stated:
        settings = WorkerSettings(model_path=path, device=device, **nested(stated))
        engine = build_engine(settings).engine
    assert isinstance(engine, Engine)
    return engine


def run(engine: Engine, jobs: list[Job]) -> list[Event]:
    for job in jobs:
        engine.submit(job)
    events = engine.step()
    while engine.scheduler.has_work:
        events += engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.used_count == 0
    return events


def prompt(length: int, seed: int = 0, vocabulary: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocabulary, length).tolist()


def greedy(ids: list[int], tokens: int = 12, **changes: object) -> Job:
    parameters = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True} | changes
    return Job(ids, Sampling(**parameters), FAR)  # type: ignore[arg-type]


def test_greedy_tokens_are_those_of_transformers() -> None:
    ids = prompt(30, vocabulary=2048)
    job = greedy(ids, 20)
    got = ids_of(job, run(build(DEMO), [job]))
    model = transformers.LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    text = list(ids)
    with torch.inference_mode():
        for _ in range(20):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert got == text[30:]


def company() -> list[Job]:
    drawn = {"temperature": 0.8, "seed": 11, "top_p": 0.95}
    lengths = [3, 40, 17, 1, 28, 9, 12, 33, 5, 20]
    return [greedy(prompt(n, seed=n), 5 + n % 7, **(drawn if n % 2 else {})) for n in lengths]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[list[int]]:
    engine = build(tiny, kv__prefix_cache=False)
    return [ids_of(job, run(engine, [job])) for job in company()]


@pytest.mark.parametrize("max_step_tokens", [9, 512])
def test_tokens_do_not_depend_on_company_or_chunks(
    tiny: Path, alone: list[list[int]], max_step_tokens: int
) -> None:
    """WK-3, greedy and drawn: alone, in a batch that comes and goes, in chunks of any size."""
    batch = company()
    events = run(build(tiny, max_step_tokens=max_step_tokens), batch)
    assert [ids_of(job, events) for job in batch] == alone


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_tokens_do_not_depend_on_what_is_cached(tiny: Path, prefix_cache: bool) -> None:
    """WK-3, WK-5: the same conversations without a cache and on an engine that has seen them."""
    ids = prompt(50)
    texts = [ids, ids[:30] + prompt(25, seed=9), ids[:49], ids + prompt(9, seed=4)]

    def jobs() -> list[Job]:
        drawn = {"temperature": 0.8, "seed": 11}
        return [greedy(text, 9, **(drawn if i % 2 else {})) for i, text in enumerate(texts)]

    fresh = build(tiny, kv__prefix_cache=False)
    alone = [ids_of(job, run(fresh, [job])) for job in jobs()]
    engine = build(tiny, kv__prefix_cache=prefix_cache)
    for _ in range(2):
        for job, expected in zip(jobs(), alone, strict=True):
            events = run(engine, [job])
            assert ids_of(job, events) == expected
        assert bool(end_of(job, events).cached_tokens) == prefix_cache
    together = jobs()
    events = run(engine, together)
    assert [ids_of(job, events) for job in together] == alone


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_on_cuda_are_those_on_the_cpu(tiny: Path) -> None:
    def texts(device: str) -> list[list[int]]:
        jobs = [greedy(prompt(n, seed=n), 10, seed=3) for n in (3, 40, 17)]
        events = run(build(tiny, device, dtype="float32"), jobs)
        return [ids_of(job, events) for job in jobs]

    assert texts("cuda") == texts("cpu")
