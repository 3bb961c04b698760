"""First steps at load, so that no request waits for a compiler in the middle of a batch.

vLLM compiles parts of its sampler when a request first asks for them, and again for the first batch
of more than one: some ten seconds each on a CPU, while all jobs stand still.
"""

import math
from collections.abc import Sequence

from protocol import FinishReason, Sampling
from worker.core import Job
from worker.engines.vllm.backend import CoreParts, VllmBackend
from worker.engines.vllm.image_files import blank_file
from worker.errors import BrokenCheckpoint

_PROMPT = (0, 1, 2, 3)
_TOKENS = 3
_GREEDY = Sampling(max_tokens=_TOKENS, temperature=0.0, logprobs=1, prompt_logprobs=1)
_DRAWN = Sampling(
    max_tokens=_TOKENS,
    min_tokens=1,
    top_p=0.9,
    top_k=2,
    seed=1,
    logprobs=2,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
)
_FILTERED = Sampling(max_tokens=_TOKENS, top_p=0.9, min_p=0.1)


def warm_up(parts: CoreParts, most: int) -> None:
    """Have vLLM do once whatever requests may ask of it, ``most`` jobs at a time. Raises
    ``BrokenCheckpoint`` where it fails at an image."""
    backend = VllmBackend(parts)
    speculates = parts.core.vllm_config.speculative_config is not None
    second = [_GREEDY] if speculates else [_DRAWN, _FILTERED, _GREEDY]
    for wave in ([_GREEDY], second[: max(1, most)]):
        _run(backend, [Job(_PROMPT, sampling, math.inf) for sampling in wave])
    _run(backend, [Job(_PROMPT, _GREEDY, math.inf, adapter=name) for name in parts.adapters][:1])
    if parts.images is not None:
        file, size = blank_file()
        vision = parts.images.vision
        ids = [*_PROMPT, *[vision.token_id] * vision.tokens_of(*size), *_PROMPT]
        try:
            _run(backend, [Job(ids, _GREEDY, math.inf, images=[file])])
        except Exception as error:  # whatever a model's code raises
            raise BrokenCheckpoint(
                f"vLLM fails at an image with this model: {error};"
                " TIDEGATE_WORKER__ENGINE_ARGS=language_model_only=true has it read text only"
            ) from error
    parts.core.reset_prefix_cache()
    if parts.reports is not None:
        parts.reports.take()


def _run(backend: VllmBackend, jobs: Sequence[Job]) -> None:
    for handle, job in enumerate(jobs):
        backend.add(handle, job, _TOKENS)
    while backend.load().running or backend.load().waiting:
        for made in backend.step(0.1):
            if made.end is FinishReason.ERROR:
                raise RuntimeError(made.message)
