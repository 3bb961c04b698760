"""Sampling as vLLM spells it, in its own server's requests and in those of its Triton backend."""

from typing import Any

from protocol import Sampling

_USUAL = Sampling(max_tokens=1)
_UNUSUAL = (
    "min_tokens",
    "ignore_eos",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
)
"""Parameters that few requests state: they are sent if they differ from the defaults."""


def vllm_sampling(sampling: Sampling) -> dict[str, Any]:
    """Parameters for vLLM; log-probabilities are each caller's own to ask for."""
    stated: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
    }
    stated |= {n: v for n in _UNUSUAL if (v := getattr(sampling, n)) != getattr(_USUAL, n)}
    if sampling.stop:
        stated["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        stated["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        stated["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.seed is not None:  # 64 bits here; vLLM's are signed
        stated["seed"] = (sampling.seed + 2**63) % 2**64 - 2**63
    return stated
