"""Encodes the slot model's requests and reads its answers (``model_repository/slot``)."""

import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from clips.dispatch.task import MODEL
from orchestrator.lanes.wire import service_pb2

METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
RECIPE: Final = "recipe"
EVENT: Final = "event"

_LENGTH = struct.Struct("<I")
_WORDS_OF_ABSENCE = ("unknown model", "no available versions", "not at ready state")
"""Texts in Triton's errors for a model that is missing or not ready."""


class BadAnswer(ValueError):
    """An answer that breaks the slot model's contract."""


class ClipAnswer(NamedTuple):
    """One answer: an event with files, or ``error`` with the worker's or Triton's message."""

    event: Mapping[str, Any]
    tensors: Mapping[str, bytes]
    error: str = ""


def is_absence(error: str) -> bool:
    """Whether an error of Triton means that it does not have the model now."""
    return any(words in error for words in _WORDS_OF_ABSENCE)


def request(recipe: bytes, request_id: str, parameters: Mapping[str, str | bool | float]) -> bytes:
    made = service_pb2.ModelInferRequest(
        model_name=MODEL,
        id=request_id,
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(name=RECIPE, datatype="BYTES", shape=[1])
        ],
        raw_input_contents=[_LENGTH.pack(len(recipe)) + recipe],
    )
    for name, value in parameters.items():
        if isinstance(value, bool):
            made.parameters[name].bool_param = value
        elif isinstance(value, str):
            made.parameters[name].string_param = value
        else:
            made.parameters[name].double_param = value
    data: bytes = made.SerializeToString()
    return data


def read_answer(message: bytes) -> ClipAnswer | None:
    """Read one message; None if it has no data (Triton's empty final). Raises ``BadAnswer``, and
    protobuf's ``DecodeError``."""
    response = service_pb2.ModelStreamInferResponse.FromString(message)
    if response.error_message:
        return ClipAnswer({}, {}, response.error_message)
    answer = response.infer_response
    names = [output.name for output in answer.outputs]
    if not names:
        return None
    contents = answer.raw_output_contents
    if len(contents) != len(names):
        raise BadAnswer("an answer without the contents of its outputs")
    tensors = dict(zip(names, contents, strict=True))
    raw = tensors.pop(EVENT, b"")
    if len(raw) < 4 or len(raw) - 4 != _LENGTH.unpack_from(raw)[0]:
        raise BadAnswer(f"expected one BYTES element as {EVENT!r}, got {len(raw)} bytes")
    try:
        event = msgspec.json.decode(raw[4:], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadAnswer(f"an event that cannot be read: {error}") from None
    return ClipAnswer(event, tensors)
