"""Converts a job to vLLM's ``SamplingParams`` and ``Request``, and a step's results back.

vLLM's front end, which is bypassed here, checks values that its engine core trusts: in the core, a
value out of range raises in the middle of a step and ends the engine with all of its jobs. So this
module does the checks of the front end (``SamplingParams.verify``) and of the model runner.

``GrammarState`` and ``GrammarMasks`` have the methods that vLLM's structured outputs call by name,
except those for speculative tokens: with speculation, the card says that there are no grammars.
"""

import math
from collections.abc import Collection
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol import Code, FinishReason, PromptLogprobs, TokenLogprob
from worker.core import Job
from worker.engines.stepped import Produced
from worker.engines.vllm.images import Pictures
from worker.engines.vllm.prefix_cache import BlockHasher
from worker.errors import InvalidCall
from worker.grammar.constraint import Constraint

EndMask = NDArray[np.uint32]
"""Tokens that end a text, as bits: uint32 [vocabulary / 32]."""


def end_mask(vocab_size: int, eos_token_ids: Collection[int]) -> EndMask:
    """Mask of the tokens that may follow a complete text: the end tokens."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in eos_token_ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


class GrammarState:
    """One text's progress through its grammar."""

    def __init__(self, constraint: Constraint, ends: EndMask) -> None:
        self._constraint = constraint
        self._ends = ends
        self._generated: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Record tokens. Always True: ``Constraint.error`` reports tokens that break the grammar,
        which vLLM would log."""
        self._generated += tokens
        self._constraint.advance(self._generated)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._generated[-num_tokens:]
            self._constraint.advance(self._generated)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Fill one row of ``bitmask``, a tensor int32 [rows, vocabulary / 32] on the CPU."""
        self._constraint.fill(bitmask[batch_index].numpy().view(np.uint32), self._ends)

    def is_terminated(self) -> bool:
        """Always False: ``fill`` lets a complete text continue with an end token only."""
        return False

    def reset(self) -> None:
        self.rollback(len(self._generated))


class GrammarMasks:
    """Allocates the memory for a step's masks."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        import torch

        return torch.full((max_num_seqs, self._words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing, since nothing is held."""


_HOTTEST: Final = 2.0
"""Highest temperature that the constructor accepts; the sampler accepts more."""
_NONE: Final = -1
"""A seed that means "no seed" to the constructor, and a number to the sampler."""
MAX_STOP_TOKENS: Final = 128
"""Maximum stop tokens that ``min_tokens`` can bar: vLLM's ``MAX_NUM_STOP_TOKEN_IDS``."""
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
    seen: Pictures | None = None,
) -> Any:
    """Make a ``Request`` for vLLM's scheduler. Raises ``InvalidCall`` if this vLLM refuses it.

    If it ``continues`` texts, the answer's tokens from another worker are put into the request as
    if they were generated here: they count for penalties and ``min_tokens``. ``adapter`` is a
    ``LoRARequest``, None for the model itself; ``seen`` has the prompt's images.
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


_ENDS: Final = {0: FinishReason.STOP, 1: FinishReason.LENGTH}
"""The ends by a job's own rules in vLLM's ``FinishReason``, an ``IntEnum``."""


def produced(job: Job, output: Any) -> Produced:
    """Translate an ``EngineCoreOutput`` of ``job``."""
    made = Produced(int(output.request_id), output.new_token_ids)
    asked = job.sampling
    if asked.logprobs is not None and output.new_logprobs is not None:
        made.logprobs = token_logprobs(output.new_logprobs, asked.logprobs)
    if asked.prompt_logprobs is not None and output.new_prompt_logprobs_tensors is not None:
        made.prompt = prompt_logprobs(output.new_prompt_logprobs_tensors, asked.prompt_logprobs)
    if output.prefill_stats is not None:
        made.cached_tokens = output.prefill_stats.num_cached_tokens
    if output.finish_reason is not None:
        made.end = _ENDS.get(int(output.finish_reason), FinishReason.ERROR)
        if made.end is FinishReason.ERROR:
            made.code = Code.ENGINE_ERROR
            made.message = "vLLM ended the request with an error; the worker's log says more"
    return made


def token_logprobs(lists: Any, top: int) -> list[TokenLogprob]:
    """Translate ``LogprobsLists``: arrays [tokens, 1 + most that a row of the step asks for], the
    chosen token's first."""
    ids = np.asarray(lists.logprob_token_ids)[:, 1 : top + 1].tolist()
    values = np.asarray(lists.logprobs)[:, : top + 1].tolist()
    ranks = np.asarray(lists.sampled_token_ranks).tolist()
    return [
        TokenLogprob(row[0], list(zip(likely, row[1:], strict=True)), rank)
        for likely, row, rank in zip(ids, values, ranks, strict=True)
    ]


def prompt_logprobs(tensors: Any, top: int) -> PromptLogprobs | None:
    """Translate ``LogprobsTensors`` [prompt tokens - 1, 1 + top], each prompt token's own first.
    None if it has no rows."""
    ids = tensors.logprob_token_ids.cpu().numpy()[:, 1 : top + 1]
    values = tensors.logprobs.cpu().numpy()
    if not len(values):
        return None
    return PromptLogprobs(
        1,
        top,
        values[:, 0].astype("<f4").tobytes(),
        tensors.selected_token_ranks.cpu().numpy().astype("<i4").tobytes(),
        np.ascontiguousarray(ids, dtype="<i4").tobytes(),
        np.ascontiguousarray(values[:, 1 : top + 1], dtype="<f4").tobytes(),
    )
