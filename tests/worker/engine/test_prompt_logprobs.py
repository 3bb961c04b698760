"""Log-probabilities of a prompt's own tokens, from the engine, against transformers' own."""

from pathlib import Path

import pytest
import torch

from protocol import TokenLogprob
from tests.support.engine import end_of
from tests.support.lazy import transformers
from tests.worker.engine.test_torch_engine import build, greedy, prompt, run
from worker.core import Event, Job, JobPrompt
from worker.sampling import prompt_results


def read_of(job: Job, events: list[Event]) -> list[TokenLogprob]:
    """What the engine has told, in order and without a gap."""
    read: list[TokenLogprob] = []
    for event in events:
        if isinstance(event, JobPrompt) and event.job is job:
            assert event.logprobs.first == len(read) + 1
            read += event.logprobs.unpack()
    return read


def expected_of(path: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def test_they_are_those_of_transformers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, next to others, and made a few at a time."""
    monkeypatch.setattr(prompt_results, "_MAX_TOKENS", 3)
    ids = prompt(23)
    jobs = [greedy(ids, 2, prompt_logprobs=4), greedy(prompt(9, seed=2)), greedy(ids[:2], 3)]
    events = run(build(tiny, max_step_tokens=9), jobs)
    read, expected = read_of(jobs[0], events), expected_of(tiny, ids)
    assert len(read) == 22 and not read_of(jobs[1], events)
    for at, entry in enumerate(read, start=1):
        chances = expected[at - 1]
        assert entry.logprob == pytest.approx(float(chances[ids[at]]), abs=1e-4)
        assert entry.rank == pytest.approx(int((chances >= chances[ids[at]]).sum()), abs=1)
        best = chances.topk(4).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-4)


def test_a_cached_prefix_is_read_again(tiny: Path) -> None:
    engine, ids = build(tiny), prompt(40)
    first = greedy(ids, 2)
    run(engine, [first])
    job, after = greedy(ids, 2, prompt_logprobs=0), greedy(ids, 2)
    events = run(engine, [job])
    assert len(read_of(job, events)) == 39 and end_of(job, events).cached_tokens == 0
    assert end_of(after, run(engine, [after])).cached_tokens > 0
