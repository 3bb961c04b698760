"""Which features of an engine a request's sampling cannot do without."""

from worker.protocol.card import Feature
from worker.protocol.sampling import Sampling


def features_of(sampling: Sampling) -> tuple[Feature, ...]:
    """Sorted. A worker whose card ``lacks`` one of them would answer something else."""
    asked = {
        Feature.IGNORE_EOS: sampling.ignore_eos,
        Feature.LOGIT_BIAS: bool(sampling.logit_bias),
        Feature.LOGPROBS: sampling.logprobs is not None,
        Feature.MIN_TOKENS: sampling.min_tokens > 0,
        Feature.PENALTIES: (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        ),
        Feature.PROMPT_LOGPROBS: sampling.prompt_logprobs is not None,
        Feature.SEED: sampling.seed is not None and sampling.temperature > 0,
        Feature.STOP_TOKEN_IDS: bool(sampling.stop_token_ids),
    }
    return tuple([feature for feature, is_asked in asked.items() if is_asked])
