"""Bodies of the plain contract.

Sampling is stated in ``sampling_parameters``, a JSON object in a string, or, without it, in
``parameters``; numbers may be strings there. Deadlines count anywhere, and the earliest wins
(DL-1). In addition to vLLM's parameters there are those of every dialect (``GrammarRequest``).
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from orchestrator.api.http.decode import Reader
from orchestrator.api.http.fields import NULL
from orchestrator.api.http.grammars import GrammarRequest
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Prompt
from protocol import excerpt
from protocol import tensors as names
from protocol.tensors import DEFAULT_MAX_TOKENS, UnsupportedParameter, stated_parameters

_DEADLINES = (
    names.PARAM_DEADLINE_MS,
    names.PARAM_DEADLINE_UNIX_MS,
    names.PARAM_FIRST_TOKEN_MS,
    names.PARAM_TOKEN_GAP_MS,
)
_BESIDE = (
    *_DEADLINES,
    "on_deadline",
    "priority",
    "tenant",
    "session_id",
    "idle_keep_s",
    "calls_left",
    "max_run_tokens",
    "max_run_cost",
    "placement",
)
"""Names that are read from ``parameters`` even when ``sampling_parameters`` is present."""


RequestId = Annotated[str, msgspec.Meta(max_length=256)]
"""The client's id for the request, returned with the answer."""


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /v2/models/{model}/generate`` and ``generate_stream``."""

    text_input: str
    stream: bool = False
    sampling_parameters: str = ""
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    id: RequestId = ""
    parameters: msgspec.Raw = NULL


class StatedRequest(GrammarRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The prompt and all parameters, from which the job is made."""

    default_max_tokens: ClassVar[int | None] = DEFAULT_MAX_TOKENS

    text_input: str
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    deadline_unix_ms: float | None = None
    guided_decoding: msgspec.Raw = NULL
    """Grammar field of Triton's vLLM backend: what ``structured_outputs`` states, in a string."""

    def prompt_of(self) -> Prompt:
        return self.text_input

    def own_sampling(self) -> Mapping[str, Any]:
        return {
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "skip_special_tokens": self.skip_special_tokens,
        }

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def field_names(self) -> Mapping[str, str]:
        return {"prompt": names.TEXT_INPUT}


_reader = Reader(StatedRequest, strict=False)
_object_decoder = msgspec.json.Decoder(dict[str, Any] | None)


def read_stated(body: GenerateRequest, model: str, unix_ms: float) -> StatedRequest:
    """Everything that a request, which came at ``unix_ms``, asks for. Raises ``InvalidRequest``."""
    beside = _object(body.parameters, "parameters")
    sampling = beside
    if body.sampling_parameters:
        sampling = _object(body.sampling_parameters.encode(), names.SAMPLING_PARAMETERS)
        beside = {name: value for name, value in beside.items() if name in _BESIDE}
        sampling = {**beside, **sampling}
    own = {"model": model, names.TEXT_INPUT: body.text_input}
    one = _convert(sampling | own)
    other = _convert(beside | own) if body.sampling_parameters else one
    changes = {name: _earliest(getattr(one, name), getattr(other, name)) for name in _DEADLINES}
    until = changes.pop(names.PARAM_DEADLINE_UNIX_MS)
    if until is not None:
        changes["deadline_ms"] = _earliest(changes["deadline_ms"], until - unix_ms)
    return msgspec.structs.replace(one, **changes)


def _object(text: msgspec.Raw | bytes, field: str) -> dict[str, Any]:
    try:
        return _object_decoder.decode(text) or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = excerpt(error, 200)
        raise InvalidRequest(f"{field} must be a JSON object: {why}", field=field) from None


def _convert(source: Mapping[str, Any]) -> StatedRequest:
    try:
        stated = stated_parameters(source)
        priority = source.get("priority")
        if isinstance(priority, str) and not priority.isdigit():  # a number is Triton's own
            stated["priority"] = priority
        return _reader.read(msgspec.json.encode(stated).decode(), "parameters")
    except UnsupportedParameter as error:
        raise InvalidRequest(str(error), field="parameters") from None
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"parameters: {excerpt(error, 200)}", field="parameters") from None


def _earliest(one: float | None, other: float | None) -> float | None:
    stated = [value for value in (one, other) if value is not None]
    if any(math.isnan(value) for value in stated):
        raise InvalidRequest("a deadline must be a number of milliseconds", field="deadline_ms")
    return min(stated, default=None)
