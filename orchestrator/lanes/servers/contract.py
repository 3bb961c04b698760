"""Speaks the plain contracts of Triton's LLM backends: recognizes a model's, makes requests, reads
answers.

- ``vllm_backend``: ``sampling_parameters`` as one JSON object. Tidegate's worker answers it too.
- ``tensorrtllm_backend``'s ``ensemble`` and ``tensorrt_llm_bls``: a tensor for each parameter, with
names that differ by version: those of the model's metadata count.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from orchestrator.lanes.wire import service_pb2
from protocol import Feature, Sampling
from protocol import tensors as names

_USUAL = Sampling(max_tokens=1)
_RARE = (
    "min_tokens",
    "ignore_eos",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
)
"""Parameters that few requests state: they are sent if they differ from the defaults."""


def _rare(sampling: Sampling) -> dict[str, Any]:
    return {n: v for n in _RARE if (v := getattr(sampling, n)) != getattr(_USUAL, n)}


def vllm_sampling(sampling: Sampling) -> dict[str, Any]:
    """Parameters for vLLM; log-probabilities are each caller's own to ask for."""
    stated: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
    }
    stated |= _rare(sampling)
    if sampling.stop:
        stated["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        stated["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        stated["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.seed is not None:  # 64 bits here; vLLM's are signed
        stated["seed"] = (sampling.seed + 2**63) % 2**64 - 2**63
    return stated


_LENGTH = struct.Struct("<I")
_PACKED: Final = {
    "BOOL": "<?",
    "INT32": "<i",
    "INT64": "<q",
    "UINT32": "<I",
    "UINT64": "<Q",
    "FP32": "<f",
    "FP64": "<d",
}
_FINAL: Final = "triton_final_response"
ASKS_FOR_FINAL: Final = "triton_enable_empty_final_response"

TRTLLM_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "max_tokens": ("max_tokens", "request_output_len"),
    "temperature": ("temperature",),
    "top_k": ("top_k", "runtime_top_k"),
    "top_p": ("top_p", "runtime_top_p"),
    "min_tokens": ("min_tokens", "min_length"),
    "seed": ("seed", "random_seed"),
    "repetition_penalty": ("repetition_penalty",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "stop": ("stop_words",),
    "stream": ("stream", "streaming"),
}
_ALWAYS_LACKING: Final = (
    Feature.LOGPROBS,
    Feature.SPECIAL_TEXT,
    Feature.STOP_TOKEN_IDS,
    Feature.TOKEN_IDS,
)
_TRTLLM_LACKS: Final = (Feature.IGNORE_EOS, Feature.LOGIT_BIAS, Feature.MIN_P)
_BY_INPUT: Final = {
    "min_tokens": Feature.MIN_TOKENS,
    "seed": Feature.SEED,
    "repetition_penalty": Feature.PENALTIES,
    "presence_penalty": Feature.PENALTIES,
    "frequency_penalty": Feature.PENALTIES,
}


class NoSuchContract(ValueError):
    """The model has none of these contracts for text."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    datatype: str
    rank: int


class PlainAnswer(NamedTuple):
    """One response. ``tokens`` is None if the model does not count them; ``finish_reason`` is empty
    until the text ends."""

    text: str
    tokens: int | None
    finish_reason: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class Contract:
    """The inputs and outputs of one model."""

    engine: str
    lacks: tuple[Feature, ...]
    inputs: Mapping[str, _Tensor]
    outputs: frozenset[str]

    @property
    def is_trtllm(self) -> bool:
        return names.SAMPLING_PARAMETERS not in self.inputs

    def request(
        self, model: str, request_id: str, prompt: str, sampling: Sampling
    ) -> service_pb2.ModelInferRequest:
        request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        request.parameters[ASKS_FOR_FINAL].bool_param = True
        self._add(request, names.TEXT_INPUT, [prompt])
        if self.is_trtllm:
            for parameter, values in _trtllm_values(sampling).items():
                found = [name for name in TRTLLM_NAMES[parameter] if name in self.inputs]
                if found:
                    self._add(request, found[0], values)
        else:
            parameters = msgspec.json.encode(vllm_sampling(sampling)).decode()
            self._add(request, names.SAMPLING_PARAMETERS, [parameters])
            self._add(request, names.STREAM, [True])
        for flag in (
            names.EXCLUDE_INPUT_IN_OUTPUT,
            names.RETURN_FINISH_REASON,
            names.RETURN_NUM_OUTPUT_TOKENS,
        ):
            if flag in self.inputs:
                self._add(request, flag, [True])
        for output in (names.TEXT_OUTPUT, names.FINISH_REASON, names.NUM_OUTPUT_TOKENS):
            if output in self.outputs:
                request.outputs.add(name=output)
        return request

    def answer(self, response: service_pb2.ModelInferResponse) -> PlainAnswer:
        outputs = zip(response.outputs, response.raw_output_contents, strict=False)
        raw = {tensor.name: data for tensor, data in outputs}
        counts = raw.get(names.NUM_OUTPUT_TOKENS)
        reason = _joined(raw.get(names.FINISH_REASON, b""))
        return PlainAnswer(
            _joined(raw.get(names.TEXT_OUTPUT, b"")),
            None if counts is None else sum(struct.unpack(f"<{len(counts) // 4}I", counts)),
            "" if reason == "None" else reason,
            _FINAL in response.parameters and response.parameters[_FINAL].bool_param,
        )

    def _add(
        self, request: service_pb2.ModelInferRequest, name: str, values: Sequence[Any]
    ) -> None:
        tensor = self.inputs[name]
        request.inputs.add(
            name=name,
            datatype=tensor.datatype,
            shape=[1] * (tensor.rank - 1) + [len(values)],
        )
        request.raw_input_contents.append(b"".join(_packed(tensor, value) for value in values))


def contract_of(metadata: service_pb2.ModelMetadataResponse) -> Contract:
    """The contract that a model has. Raises ``NoSuchContract``."""
    inputs = {
        tensor.name: _Tensor(tensor.name, tensor.datatype, len(tensor.shape))
        for tensor in metadata.inputs
    }
    outputs = frozenset(tensor.name for tensor in metadata.outputs)
    text = inputs.get(names.TEXT_INPUT)
    if text is None or text.datatype != "BYTES" or names.TEXT_OUTPUT not in outputs:
        raise NoSuchContract(
            f"the model {metadata.name!r} has no {names.TEXT_INPUT} and {names.TEXT_OUTPUT}: "
            "expected vllm_backend's contract, or the ensemble or tensorrt_llm_bls of "
            "tensorrtllm_backend"
        )
    if names.SAMPLING_PARAMETERS in inputs and names.STREAM in inputs:
        return Contract("triton-vllm", _ALWAYS_LACKING, inputs, outputs)
    if any(name in inputs for name in TRTLLM_NAMES["max_tokens"]):
        missing = {
            feature
            for parameter, feature in _BY_INPUT.items()
            if not any(name in inputs for name in TRTLLM_NAMES[parameter])
        }
        lacks = (*_ALWAYS_LACKING, *_TRTLLM_LACKS, *missing)
        return Contract("triton-tensorrtllm", lacks, inputs, outputs)
    raise NoSuchContract(
        f"the model {metadata.name!r} takes text, but neither {names.SAMPLING_PARAMETERS} nor "
        "max_tokens: its contract is not known here"
    )


def _trtllm_values(sampling: Sampling) -> dict[str, list[Any]]:
    # Greedy means the likeliest token only; some versions refuse a temperature of 0.
    is_greedy = sampling.temperature == 0
    values: dict[str, list[Any]] = {
        "max_tokens": [sampling.max_tokens],
        "stream": [True],
        "temperature": [1.0 if is_greedy else sampling.temperature],
        "top_k": [1 if is_greedy else max(0, sampling.top_k)],
        "top_p": [sampling.top_p],
    }
    values |= {name: [value] for name, value in _rare(sampling).items() if name in TRTLLM_NAMES}
    if sampling.seed is not None:
        values["seed"] = [sampling.seed % 2**63]
    if sampling.stop:
        values["stop"] = list(sampling.stop)
    return values


def _packed(tensor: _Tensor, value: Any) -> bytes:
    if tensor.datatype == "BYTES":
        data: bytes = value.encode()
        return _LENGTH.pack(len(data)) + data
    return struct.pack(_PACKED[tensor.datatype], value)


def _joined(raw: bytes) -> str:
    """The strings of a BYTES tensor, joined."""
    found, at = "", 0
    while at + 4 <= len(raw):
        (size,) = _LENGTH.unpack_from(raw, at)
        found += raw[at + 4 : at + 4 + size].decode(errors="replace")
        at += 4 + size
    return found
