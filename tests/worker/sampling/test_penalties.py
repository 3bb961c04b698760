"""Penalties and biases against the formulas written out, and against transformers' own."""

from collections import Counter

import numpy as np
import torch

from protocol import Sampling
from tests.support.cases import for_each
from tests.support.lazy import transformers
from worker.core import Job
from worker.sampling.sampler import Sampler
from worker.scheduler.request import Request

CPU = torch.device("cpu")
VOCABULARY = 60
LONGEST = 64


def sampler(slots: int) -> Sampler:
    return Sampler((), CPU, slots=slots, vocab_size=VOCABULARY, max_tokens=LONGEST)


def request_of(prompt: list[int], **params: object) -> Request:
    sampling = Sampling(LONGEST, temperature=0.0, **params)  # type: ignore[arg-type]
    return Request(Job(prompt, sampling, 0.0), submitted_at=0.0, own_seed=1)


def slow(logits: torch.Tensor, request: Request) -> np.ndarray:
    """One text's logits, token by token."""
    asked = request.job.sampling
    values = logits.double().numpy().copy()
    for token, bias in asked.logit_bias:
        values[token] += bias
    answer = Counter(request.tokens[request.prompt_tokens :])
    for token in set(request.tokens):
        if values[token] > 0:
            values[token] /= asked.repetition_penalty
        else:
            values[token] *= asked.repetition_penalty
        count = answer[token]
        values[token] -= asked.frequency_penalty * count + asked.presence_penalty * (count > 0)
    return values


def step(on: Sampler, logits: torch.Tensor, requests: list[tuple[int, Request]]) -> torch.Tensor:
    """What a step makes of the logits; the requests' slots, and the tokens that they get."""
    changed = logits.clone()
    ids, _ = on.sample(
        changed,
        np.array([slot for slot, _ in requests]),
        np.array([len(request.tokens) for _, request in requests]),
        torch.tensor([request.tokens[-1] for _, request in requests]),
    ).read()
    assert ids == changed.argmax(-1).tolist()
    for (_, request), token in zip(requests, ids, strict=True):
        request.tokens.append(token)
    return changed


def random_request(draw: np.random.Generator) -> Request:
    biased = draw.choice(VOCABULARY, int(draw.integers(0, 5)), replace=False)
    return request_of(
        draw.integers(0, VOCABULARY, int(draw.integers(1, 20))).tolist(),
        repetition_penalty=float(draw.choice([1.0, 0.7, 1.3, 5.0])),
        presence_penalty=float(draw.choice([0.0, -2.0, 0.4])),
        frequency_penalty=float(draw.choice([0.0, 1.1, -0.3])),
        logit_bias=tuple((int(i), float(draw.normal(0, 5))) for i in biased),
    )


@for_each("seed", range(5))
def test_each_row_is_changed_as_the_formula_says(seed: int) -> None:
    """WK-8: texts that come, go, skip steps and take each other's slots."""
    draw = np.random.default_rng(seed)
    on, slots = sampler(6), dict[int, Request]()
    for _ in range(60):
        for slot in range(6):
            ended = slot in slots and (len(slots[slot].tokens) >= 40 or draw.random() < 0.1)
            if slot not in slots or ended:
                slots[slot] = random_request(draw)
                on.begin(slot, slots[slot])
        stepping = [(s, r) for s, r in slots.items() if draw.random() < 0.7]
        if not stepping:
            continue
        logits = torch.from_numpy(draw.normal(0, 4, (len(stepping), VOCABULARY))).float()
        expected = [slow(row, r) for row, (_, r) in zip(logits, stepping, strict=True)]
        changed = step(on, logits, stepping)
        np.testing.assert_allclose(changed.numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def test_a_step_that_is_tried_again_counts_nothing_twice() -> None:
    """WK-4: a step may fail after its sampling began."""
    on, request = sampler(1), request_of([1, 2], frequency_penalty=1.0)
    on.begin(0, request)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7] = 9.0
    step(on, logits, [(0, request)])
    for _ in range(3):
        again = logits.clone()
        on.sample(again, np.array([0]), np.array([3]), torch.tensor([7]))
        assert again[0, 7] == 8.0


def test_a_text_that_grew_by_several_tokens_is_read_again() -> None:
    on, request = sampler(1), request_of([1], presence_penalty=0.5, frequency_penalty=0.25)
    on.begin(0, request)
    request.tokens += [3, 3, 4]
    logits = torch.ones(1, VOCABULARY)
    changed = step(on, logits, [(0, request)])
    assert changed[0, [1, 3, 4, 5]].tolist() == [1.0, 0.0, 0.25, 1.0]


@for_each("penalty", [0.5, 1.2, 3.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    prompt = [4, 9, 9, 30]
    on, request = sampler(1), request_of(prompt, repetition_penalty=penalty)
    on.begin(0, request)
    for seed in range(6):
        logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
        text = torch.tensor([request.tokens])
        expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(text, logits.clone())
        torch.testing.assert_close(step(on, logits, [(0, request)]), expected)
