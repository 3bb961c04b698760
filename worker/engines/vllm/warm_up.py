"""First steps at load, so that no request waits for a compiler in the middle of a batch.

vLLM compiles parts of its sampler when a request first asks for them, and again for the first batch
of more than one: some ten seconds each on a CPU, while all jobs stand still.
"""

import math

from worker.core import Job
from worker.engines.vllm.backend import CoreParts, VllmBackend
from worker.protocol import Sampling

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
    """Have vLLM do once whatever requests may ask of it, ``most`` jobs at a time."""
    backend = VllmBackend(parts)
    speculates = parts.core.vllm_config.speculative_config is not None
    second = [_GREEDY] if speculates else [_DRAWN, _FILTERED, _GREEDY]
    for wave in ([_GREEDY], second[: max(1, most)]):
        for handle, sampling in enumerate(wave):
            backend.add(handle, Job(_PROMPT, sampling, math.inf), _TOKENS)
        while backend.load().running or backend.load().waiting:
            backend.step(0.0)
    parts.core.reset_prefix_cache()
    if parts.reports is not None:
        parts.reports.take()
