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
