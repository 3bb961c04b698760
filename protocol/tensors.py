"""Tensor and parameter names of the ``llm`` model.

The plain contract has the same names as Triton's vLLM backend, so that its clients work unmodified.
``LANE_MESSAGE`` and ``FRAME`` are ours and optional: a client that does not use lanes never sees
them.
"""

from typing import Final

MODEL_NAME: Final = "llm"

# inputs of the plain contract
TEXT_INPUT: Final = "text_input"
STREAM: Final = "stream"
SAMPLING_PARAMETERS: Final = "sampling_parameters"
EXCLUDE_INPUT_IN_OUTPUT: Final = "exclude_input_in_output"

# outputs of the plain contract; for all but the first, an input ``return_…`` asks
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
