"""Section ``draws``: what choosing tokens costs beside the model, by sampling parameters."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import torch
from msgspec.structs import replace

from perf.engine.runs import NEVER
from perf.engine.timing import timed_ms
from perf.report.rows import Report
from protocol import Sampling
from worker.core import Job
from worker.grammar.masks import Masks
from worker.sampling.masks import apply_
from worker.sampling.sampler import Sampler
from worker.scheduler.request import make_request

_PLAIN: Final = Sampling(max_tokens=64, temperature=0.8)
_KINDS: Final = {
    "greedy": replace(_PLAIN, temperature=0.0),
    "temperature": _PLAIN,
    "top_k 50": replace(_PLAIN, top_k=50),
    "top_p 0.9": replace(_PLAIN, top_p=0.9),
    "top_k 50, top_p 0.9, min_p 0.05": replace(_PLAIN, top_k=50, top_p=0.9, min_p=0.05),
    "penalties": replace(_PLAIN, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2),
    "5 logprobs": replace(_PLAIN, temperature=0.0, logprobs=5),
}
_PROMPT_TOKENS: Final = 1024


def draws(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Time ``Sampler.sample`` on logits of a vocabulary of 128,256, and compare its tokens with
    those that it draws on the CPU from the same logits."""
    vocabulary, counts = (2000, (1, 4)) if tiny else (128_256, (1, 32, 64))
    for rows in counts:
        # As peaked as a trained model's: flat logits would make every top_p examine everything.
        logits = 4 * torch.randn(
            rows, vocabulary, generator=torch.Generator().manual_seed(rows), dtype=torch.float32
        )
        for kind, sampling in _KINDS.items():
            report.attempt(
                f"{kind}, {rows} rows",
                lambda k=kind, s=sampling, x=logits: _one(report, device, k, s, x),  # type: ignore[misc]
            )
        report.attempt(f"grammar, {rows} rows", lambda x=logits: _masked(report, device, x))  # type: ignore[misc]
        if device.type == "cuda" and find_spec("flashinfer") is not None:
            report.attempt(
                f"FlashInfer, {rows} rows",
                lambda x=logits: _by_flashinfer(report, x.to(device)),  # type: ignore[misc]
            )


def _one(
    report: Report, device: torch.device, kind: str, sampling: Sampling, logits: torch.Tensor
) -> None:
    rows = len(logits)
    there = logits.to(device)
    sample = _sampler(sampling, rows, logits.shape[-1], device)
    ids = sample(there.clone())
    expected = _sampler(sampling, rows, logits.shape[-1], torch.device("cpu"))(logits.clone())
    same = int((ids.cpu() == expected).sum())
    ms = timed_ms(lambda: sample(there.clone()), device) - timed_ms(there.clone, device)
    note = f"{same} of {rows} tokens are the CPU's"
    report.add(f"{kind}, {rows} rows", ms * 1e3, "µs", note)


def _sampler(sampling: Sampling, rows: int, vocabulary: int, device: torch.device):  # type: ignore[no-untyped-def]
    sampler = Sampler([1], device, slots=rows, vocab_size=vocabulary, max_tokens=2 * _PROMPT_TOKENS)
    prompts = np.random.default_rng(9).integers(2, vocabulary, (rows, _PROMPT_TOKENS))
    for slot in range(rows):
        job = Job(prompts[slot].tolist(), sampling, NEVER)
        sampler.begin(slot, make_request(job, submitted_at=0.0, own_seed=slot))
    slots, positions = np.arange(rows), np.full(rows, _PROMPT_TOKENS)
    last_ids = torch.from_numpy(prompts[:, -1].copy()).to(device)
    return lambda logits: sampler.sample(logits, slots, positions, last_ids).ids


def _by_flashinfer(report: Report, logits: torch.Tensor) -> None:
    """Time FlashInfer's own draws, to hold ours against. The worker does not use them: what a row
    draws depends on its place in the batch."""
    from flashinfer import sampling

    heat = _PLAIN.temperature
    kinds = {
        "temperature": lambda: sampling.sampling_from_logits(logits / heat),
        "top_k 50": lambda: sampling.top_k_top_p_sampling_from_logits(logits / heat, 50, 1.0),
        "top_p 0.9": lambda: sampling.top_p_sampling_from_probs((logits / heat).softmax(-1), 0.9),
    }
    for kind, call in kinds.items():
        us = timed_ms(call, logits.device) * 1e3
        report.add(f"FlashInfer: {kind}, {len(logits)} rows", us, "µs")


def _masked(report: Report, device: torch.device, logits: torch.Tensor) -> None:
    rows, vocabulary = logits.shape
    words = np.random.default_rng(3).integers(0, 2**32, (rows, -(-vocabulary // 32)), np.uint32)
    masks = Masks(np.arange(rows), words)
    there, expected = logits.to(device), logits.clone()
    ms = timed_ms(lambda: apply_(there, masks), device)
    apply_(expected, masks)
    verdict = "as on the CPU" if torch.equal(there.cpu(), expected) else "NOT as on the CPU"
    report.add(f"grammar mask, {rows} rows", ms * 1e3, "µs", verdict)
