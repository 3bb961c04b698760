"""Section ``vllm``: the same checkpoint and loads in vLLM's engine, where it is installed."""

import importlib.util
import time
from pathlib import Path

import numpy as np
import torch

from perf.engine.checkpoints import ModelShape
from perf.report.rows import Report


def vllm(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Tokens per second of answers of one length, to compare with section ``engine``'s rows.

    Neither has a server around it. vLLM has its own defaults for everything but the number of
    sequences and the longest text.
    """
    if importlib.util.find_spec("vllm") is None:
        report.add("vLLM", "left out", note="it is not installed")
        return
    path = scratch / "large"
    if not (path / "config.json").exists():
        report.add("vLLM", "left out", note="section loader or engine writes the checkpoint")
        return
    batches, keys, answer = ((1, 2), 40, 10) if tiny else ((1, 8, 32, 64), 1024, 96)
    from vllm import LLM, SamplingParams, __version__

    shape = ModelShape.of(path)
    engine = LLM(
        str(path),
        max_num_seqs=max(batches),
        max_model_len=2 * (keys + answer),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(5)

    def seconds(batch: int, params: object) -> float:
        prompts = [
            {"prompt_token_ids": rng.integers(2, shape.vocab_size, keys - 1).tolist()}
            for _ in range(batch)
        ]
        started = time.monotonic()
        engine.generate(prompts, params, use_tqdm=False)
        return time.monotonic() - started

    seconds(1, sampling)
    for batch in batches:
        # What the prompts take is measured beside, and taken off: ours counts decodes only.
        prompts_s, whole_s = seconds(batch, first), seconds(batch, sampling)
        rate = batch * (answer - 1) / (whole_s - prompts_s)
        note = f"vLLM {__version__}; prompts took {prompts_s * 1e3:.0f} ms"
        report.add(f"vLLM {batch} x {keys}", rate, "tokens/s", note)
