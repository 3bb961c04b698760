"""Translates a job to vLLM's ``SamplingParams`` and ``Request``.

vLLM's front end, which is bypassed here, checks what its engine core takes on trust: there a value
that is out of range raises in the middle of a step, and ends the engine with all of its jobs. What
its front end checks is checked here (``SamplingParams.verify``), as is what only its model runner
objects to.
"""

import math
from collections.abc import Collection
from functools import partial
from typing import Any, Final

from worker.core import Job
from worker.engines.vllm.grammar import EndMask, GrammarState
from worker.engines.vllm.images import Seen
from worker.engines.vllm.prefix_cache import BlockHasher
from worker.errors import InvalidCall

_HOTTEST: Final = 2.0
"""Highest temperature that the constructor accepts; the sampler accepts more."""
_NONE: Final = -1
"""A seed that means "no seed" to the constructor, and a number to the sampler."""
MAX_STOP_TOKENS: Final = 128
"""Most stop tokens that ``min_tokens`` can bar: vLLM's ``MAX_NUM_STOP_TOKEN_IDS``."""
_NO_DEADLINE: Final = 2**53
"""Priority of a job without a deadline, after every one with a deadline."""


def sampling_values(
    job: Job, max_tokens: int, eos_token_ids: Collection[int], begun: int = 0
) -> dict[str, Any]:
    """Arguments of ``SamplingParams`` except its temperature. End tokens become stop tokens, so
    that vLLM needs no tokenizer; stop strings are looked for outside. Raises ``InvalidCall``.

    vLLM counts ``begun`` tokens, which were generated before, among those of the answer.
    """
    asked = job.sampling
    ends = dict.fromkeys([*asked.stop_token_ids, *([] if asked.ignore_eos else eos_token_ids)])
    # A grammar may allow only the end of the text, which ``min_tokens`` must not bar then.
    least = 0 if job.constraint is not None else min(asked.min_tokens, max_tokens)
    if least and len(ends) > MAX_STOP_TOKENS:
        own = len(ends) - len(asked.stop_token_ids)
        raise InvalidCall(
            f"stop_token_ids: with min_tokens at most {MAX_STOP_TOKENS - own} tokens, got"
            f" {len(asked.stop_token_ids)}: vLLM bars {MAX_STOP_TOKENS}, the model's own"
            f" {own} among them"
        )
    return {
        "max_tokens": max_tokens + begun,
        "min_tokens": least + begun if least else 0,
        "top_p": asked.top_p,
        "top_k": max(0, asked.top_k),
        "min_p": asked.min_p,
        "seed": None if asked.seed is None else _signed(asked.seed),
        "ignore_eos": True,
        "stop_token_ids": list(ends),
        "logprobs": asked.logprobs,
        "prompt_logprobs": asked.prompt_logprobs,
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "logit_bias": dict(asked.logit_bias) or None,
        "detokenize": False,
        "skip_clone": True,
    }


def _signed(seed: int) -> int:
    """A seed's 64 bits as a signed number, which is what vLLM's arrays hold."""
    return (seed + 2**63) % 2**64 - 2**63


def priority_of(deadline: float) -> int:
    """The deadline in milliseconds as a priority: lower comes first."""
    return _NO_DEADLINE if math.isinf(deadline) else round(deadline * 1e3)


def make_request(
    handle: int,
    job: Job,
    max_tokens: int,
    eos_token_ids: Collection[int],
    hasher: BlockHasher | None,
    config: Any,
    ends: EndMask,
    *,
    continues: bool,
    adapter: Any = None,
    seen: Seen | None = None,
) -> Any:
    """A ``Request`` for vLLM's scheduler. Raises ``InvalidCall`` for what this vLLM refuses.

    Where it ``continues`` texts, what another worker generated of the answer is put into the
    request as if it had been generated here: it counts for penalties and ``min_tokens``.
    ``adapter`` is a ``LoRARequest``, None for the model itself; ``seen`` has the prompt's images.
    """
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.request import Request
    from vllm.v1.structured_output.request import StructuredOutputRequest

    temperature = job.sampling.temperature
    begun = job.begun_tokens if continues else 0
    prompt = list(job.token_ids)[: len(job.token_ids) - begun]
    values = sampling_values(job, max_tokens, eos_token_ids, begun)
    try:
        params = SamplingParams(**values, temperature=min(temperature, _HOTTEST))
        params.temperature = max(params.temperature, temperature)
        if values["seed"] == _NONE:
            params.seed = _NONE
        params.verify(config.model_config, config.speculative_config, None, None)
    except ValueError as error:
        raise InvalidCall(f"vLLM does not take these parameters: {error}") from error
    request = Request(
        request_id=str(handle),
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        cache_salt=job.cache_salt or None,
        priority=priority_of(job.deadline),
        block_hasher=partial(hasher, keyed=seen.keyed) if hasher and seen else hasher,
        mm_features=seen.features if seen else None,
        lora_request=adapter,
    )
    if begun:
        request.append_output_token_ids(list(job.token_ids)[-begun:])
    if job.constraint is not None:
        # The grammar was compiled by our compiler: every engine has the same grammars.
        structured = StructuredOutputRequest(StructuredOutputsParams(json_object=True))
        structured.grammar = GrammarState(job.constraint, ends)
        request.structured_output_request = structured
    return request
