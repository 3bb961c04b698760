"""Translates what a step of vLLM produced for a request into ``Backend``'s terms."""

from typing import Any, Final

import numpy as np

from protocol import Code, FinishReason, PromptLogprobs, TokenLogprob
from worker.core import Job
from worker.engines.backend import Produced

_STOP: Final = 0
_LENGTH: Final = 1
"""The length limit in vLLM's ``FinishReason``, an ``IntEnum`` sent between its processes."""


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
        made.end = _end(int(output.finish_reason))
        if made.end is FinishReason.ERROR:
            made.code = Code.ENGINE_ERROR
            made.message = "vLLM ended the request with an error; the worker's log says more"
    return made


def _end(reason: int) -> FinishReason:
    if reason == _STOP:
        return FinishReason.STOP
    return FinishReason.LENGTH if reason == _LENGTH else FinishReason.ERROR


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
    None where it has no rows."""
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
