"""Encodes the slot model's requests and reads its answers (``model_repository/slot``)."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from orchestrator.lanes.triton_messages import service_pb2
from orchestrator.slots.job import MODEL

METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
RECIPE: Final = "recipe"
EVENT: Final = "event"
PREVIEW: Final = "preview"

_LENGTH = struct.Struct("<I")
_LARGE = 256 * 1024
"""Size in bytes from which protobuf's copies would be felt."""
_DELIMITED = 2
_INFER_RESPONSE = 2 << 3 | _DELIMITED
"""Tag of the answer in ``ModelStreamInferResponse``."""
_CONTENTS = 6 << 3 | _DELIMITED
"""Tag of ``raw_output_contents`` in ``ModelInferResponse``."""
_WORDS_OF_ABSENCE = ("unknown model", "no available versions", "not at ready state")
"""Triton's words for a model that it does not have, or not now."""


class BadAnswer(ValueError):
    """An answer that breaks the slot model's contract."""


class Answer(NamedTuple):
    """One answer: an event with files, or ``error`` in the worker's or Triton's words."""

    event: Mapping[str, Any]
    tensors: Mapping[str, bytes]
    error: str = ""


def is_absence(error: str) -> bool:
    """Whether an error is Triton's way of saying that it has no such model now."""
    return any(words in error for words in _WORDS_OF_ABSENCE)


def request(recipe: bytes, request_id: str, parameters: Mapping[str, str | bool | float]) -> bytes:
    """A serialized request to the model."""
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


def watch_request() -> bytes:
    """A serialized request for the model's state, told again and again."""
    return request(b"", "watch", {"watch": True})


def read_answer(message: bytes) -> Answer | None:
    """Read one message; None if it has no data (Triton's empty final). Raises ``BadAnswer``, and
    protobuf's ``DecodeError``."""
    cut = _cut(message) if len(message) >= _LARGE else None
    if cut is not None:
        rest, contents = cut
        return _read(service_pb2.ModelInferResponse.FromString(rest), contents)
    response = service_pb2.ModelStreamInferResponse.FromString(message)
    if response.error_message:
        return Answer({}, {}, response.error_message)
    return _read(response.infer_response, response.infer_response.raw_output_contents)


def _read(answer: service_pb2.ModelInferResponse, contents: Sequence[bytes]) -> Answer | None:
    names = [output.name for output in answer.outputs]
    if not names:
        return None
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
    return Answer(event, tensors)


def _cut(message: bytes) -> tuple[bytes, list[bytes]] | None:
    """Split an answer's ``ModelInferResponse`` from the contents of its outputs; None if it is not
    encoded as Triton writes it.

    protobuf copies contents twice, and all of it while the event loop waits.
    """
    view = memoryview(message)
    rest, contents = bytearray(), list[bytes]()
    try:
        tag, at = _varint(view, 0)
        size, at = _varint(view, at)
        if tag != _INFER_RESPONSE or at + size != len(view):
            return None
        while at < len(view):
            begin = at
            tag, at = _varint(view, at)
            if tag & 7 != _DELIMITED:
                return None
            size, at = _varint(view, at)
            end = at + size
            if end > len(view):
                return None
            if tag == _CONTENTS:
                contents.append(bytes(view[at:end]))
            else:
                rest += view[begin:end]
            at = end
    except IndexError:
        return None
    return bytes(rest), contents


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a varint; returns it and its end. Raises ``IndexError`` if the data ends before."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
