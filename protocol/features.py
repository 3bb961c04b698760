"""Finds the features of an engine that a request's sampling needs."""

from protocol.card import Feature
from protocol.sampling import Sampling


def features_of(sampling: Sampling) -> list[Feature]:
    """Features that ``sampling`` needs: a worker that ``lacks`` one would answer differently.

    A seed is not among them: an orchestrator may have added it, so that a text can go on elsewhere.
    """
    needed: list[Feature] = []
    if sampling.ignore_eos:
        needed.append(Feature.IGNORE_EOS)
    if sampling.logit_bias:
        needed.append(Feature.LOGIT_BIAS)
    if sampling.logprobs is not None:
        needed.append(Feature.LOGPROBS)
    if sampling.min_p:
        needed.append(Feature.MIN_P)
    if sampling.min_tokens:
        needed.append(Feature.MIN_TOKENS)
    if (
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    ):
        needed.append(Feature.PENALTIES)
    if sampling.prompt_logprobs is not None:
        needed.append(Feature.PROMPT_LOGPROBS)
    if not sampling.skip_special_tokens:
        needed.append(Feature.SPECIAL_TEXT)
    if sampling.stop_token_ids:
        needed.append(Feature.STOP_TOKEN_IDS)
    return needed
