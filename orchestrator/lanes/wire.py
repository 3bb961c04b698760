"""Turns lane messages into Triton requests, and Triton responses into frames.

It uses the generated messages instead of ``tritonclient``'s classes: the hot path then costs one
protobuf parse and one msgpack parse per frame, and no numpy.
"""

import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from protocol import Frame, LaneMessage, decode_frame, encode
from protocol.tensors import FRAME, LANE_MESSAGE, MODEL_NAME, TEXT_INPUT

_CLIENT = "tritonclient.grpc"


def _import_messages() -> Any:
    """Triton's protobuf messages without the client package that contains them: it would import
    gRPC's client and ``ml_dtypes``, a tenth of the orchestrator's start."""
    package = find_spec("tritonclient")
    if _CLIENT in sys.modules or package is None:
        from tritonclient.grpc import service_pb2

        return service_pb2
    # A stand-in for the package while its message modules are imported; a later import of the
    # client finds the real client with these messages.
    stand_in = ModuleType(_CLIENT)
    folders = package.submodule_search_locations or ()
    stand_in.__path__ = [str(Path(folder) / "grpc") for folder in folders]
    sys.modules[_CLIENT] = stand_in
    try:
        from tritonclient.grpc import service_pb2
    finally:
        del sys.modules[_CLIENT]
    return service_pb2


if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2 as service_pb2
else:
    service_pb2 = _import_messages()

STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_LENGTH = struct.Struct("<I")
_EMPTY_ELEMENT = _LENGTH.pack(0)


class BadResponse(ValueError):
    """A worker's response breaks the lane protocol."""


def to_request(
    message: LaneMessage, request_id: str, model: str = MODEL_NAME
) -> service_pb2.ModelInferRequest:
    """A request to ``model`` that carries one message to the worker."""
    data = encode(message)
    return service_pb2.ModelInferRequest(
        model_name=model,
        id=request_id,
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[1])
            for name in (TEXT_INPUT, LANE_MESSAGE)
        ],
        outputs=[service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=FRAME)],
        raw_input_contents=[_EMPTY_ELEMENT, _LENGTH.pack(len(data)) + data],
    )


def to_answered_request(message: LaneMessage, model: str) -> service_pb2.ModelInferRequest:
    """A request whose only answer is Triton's empty final response."""
    request = to_request(message, "", model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def to_frame(response: service_pb2.ModelInferResponse) -> Frame | None:
    """The frame in a response; None if it carries no data (Triton's empty final). Raises
    ``BadResponse``, and ``msgspec.DecodeError`` for a frame of another shape."""
    contents = response.raw_output_contents
    if not contents:
        return None
    raw = contents[0]
    if len(raw) < 4 or len(raw) - 4 != _LENGTH.unpack_from(raw)[0]:
        raise BadResponse(f"expected one BYTES element as {FRAME!r}, got {len(raw)} bytes")
    return decode_frame(raw[4:])
