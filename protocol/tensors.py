"""Tensor and parameter names of the ``llm`` model, and the parameters of its plain contract.

The plain contract is that of Triton's vLLM backend, name for name, so that its clients work
unmodified. ``LANE_MESSAGE`` and ``FRAME`` are ours and optional: a client that does not know
about lanes never sees them.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from protocol.excerpt import excerpt

MODEL_NAME: Final = "llm"

# inputs of the plain contract
TEXT_INPUT: Final = "text_input"
STREAM: Final = "stream"
SAMPLING_PARAMETERS: Final = "sampling_parameters"
EXCLUDE_INPUT_IN_OUTPUT: Final = "exclude_input_in_output"
RETURN_FINISH_REASON: Final = "return_finish_reason"
RETURN_CUMULATIVE_LOGPROB: Final = "return_cumulative_logprob"
RETURN_LOGPROBS: Final = "return_logprobs"
RETURN_NUM_INPUT_TOKENS: Final = "return_num_input_tokens"
RETURN_NUM_OUTPUT_TOKENS: Final = "return_num_output_tokens"

# outputs of the plain contract
TEXT_OUTPUT: Final = "text_output"
FINISH_REASON: Final = "finish_reason"
CUMULATIVE_LOGPROB: Final = "cumulative_logprob"
LOGPROBS: Final = "logprobs"
NUM_INPUT_TOKENS: Final = "num_input_tokens"
NUM_OUTPUT_TOKENS: Final = "num_output_tokens"

# lanes: one msgpack message in, one msgpack frame out
LANE_MESSAGE: Final = "lane_message"
FRAME: Final = "frame"

# request parameters by which a plain client states a deadline
PARAM_DEADLINE_MS: Final = "deadline_ms"
PARAM_DEADLINE_UNIX_MS: Final = "deadline_unix_ms"
PARAM_FIRST_TOKEN_MS: Final = "first_token_ms"
PARAM_TOKEN_GAP_MS: Final = "token_gap_ms"
# and its token, if the worker requires one
PARAM_TOKEN: Final = "token"


DEFAULT_MAX_TOKENS = 16
"""Default of ``max_tokens``, vLLM's own."""

NEUTRAL: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "length_penalty": 1,
    "use_beam_search": False,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "bad_words": [],
}
"""vLLM parameters that are accepted only at the value that changes nothing, where they are not
served."""

TRITONS_OWN = ("priority", "timeout", PARAM_TOKEN)
"""Request parameters for Triton itself, or checked earlier; ignored here."""


class UnsupportedParameter(ValueError):
    """A vLLM parameter has an unsupported value; the message says which one is supported."""


def stated_parameters(source: Mapping[str, Any], served: Collection[str] = ()) -> dict[str, Any]:
    """Parameters in ``source`` that ask for something; those of ``NEUTRAL`` only where they are in
    ``served``. Raises ``UnsupportedParameter`` for another one of these."""
    stated: dict[str, Any] = {}
    for name, value in source.items():
        if name in NEUTRAL and name not in served:
            if value is not None and str(value).lower() not in _spellings(NEUTRAL[name]):
                raise UnsupportedParameter(
                    f"{name}={excerpt(repr(value))} is not supported; "
                    f"leave it out or at {NEUTRAL[name]!r}"
                )
        elif value is not None and name not in TRITONS_OWN and not name.startswith("triton_"):
            stated[name] = value
    return stated


def _spellings(neutral: object) -> set[str]:
    spelled = {str(neutral).lower()}
    if not isinstance(neutral, bool) and isinstance(neutral, int):
        spelled.add(str(float(neutral)))
    return spelled
