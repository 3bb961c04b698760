"""Embeddings from the engine, against transformers' own hidden states."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol import FinishReason, Pooling
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import end_of, ids_of
from tests.support.lazy import transformers
from tests.worker.engine.test_torch_engine import build, greedy, prompt, run
from tests.worker.runner.test_cuda_runner import build as build_with_runner
from worker.core import Event, Job
from worker.engine.card import pooling_of
from worker.settings import WorkerSettings


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def embedding(ids: list[int], pooling: Pooling) -> Job:
    job = greedy(ids, 1)
    job.pooling = pooling
    return job


def vector_of(job: Job, events: list[Event]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    end = end_of(job, events)
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 0)
    assert not ids_of(job, events)
    return np.frombuffer(end.embedding, "<f4")


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["torch", "cuda"])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_they_are_those_of_transformers(tiny: Path, pooling: Pooling, runner: str) -> None:
    """In chunks, beside a text, twice over a prefix that is cached by then."""
    engine = build(tiny) if runner == "torch" else build_with_runner(tiny, cuda_like=True)
    model = transformers.AutoModel.from_pretrained(tiny, dtype=torch.float32)
    prompts = [prompt(n, seed=n) for n in (1, 25, 37)]
    for _ in range(2):
        jobs = [embedding(ids, pooling) for ids in prompts]
        text = greedy(prompt(5), 20)
        events = run(engine, [text, *jobs])
        assert len(ids_of(text, events)) == 20
        for job, ids in zip(jobs, prompts, strict=True):
            with torch.inference_mode():
                states = model(torch.tensor([ids])).last_hidden_state[0]
            expected = states.mean(0) if pooling is Pooling.MEAN else states[-1]
            expected = expected / expected.norm()
            assert vector_of(job, events) == pytest.approx(expected.numpy(), abs=1e-4)


def test_how_is_what_the_setting_or_the_checkpoint_says(tmp_path: Path) -> None:
    def pooling(**settings: object) -> Pooling | None:
        stated = {"model_path": tmp_path, "engine": "torch"} | settings
        return pooling_of(WorkerSettings(**stated))  # type: ignore[arg-type]

    assert pooling() is Pooling.LAST
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert pooling() is Pooling.MEAN
    assert pooling(engine="synthetic-free") is None
