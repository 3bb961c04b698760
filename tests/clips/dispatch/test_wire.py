"""Answers as Triton writes them."""

import struct

import pytest
from tritonclient.grpc import service_pb2

from clips.dispatch.wire import BadAnswer, read_answer

EVENT = b'{"event":"result","seconds":1.5}'
CLIP = bytes(range(256)) * 20


def written(*names: str, contents: tuple[bytes, ...]) -> bytes:
    made = service_pb2.ModelStreamInferResponse()
    answer = made.infer_response
    answer.model_name, answer.model_version, answer.id = "slot", "1", "a/b"
    answer.parameters["triton_final_response"].bool_param = True
    for name in names:
        answer.outputs.add(name=name, datatype="UINT8", shape=[1])
    answer.raw_output_contents.extend(contents)
    data: bytes = made.SerializeToString()
    return data


WHOLE = written("event", "mp4", contents=(struct.pack("<I", len(EVENT)) + EVENT, CLIP))


def test_an_answer_that_breaks_the_contract_is_refused() -> None:
    with pytest.raises(BadAnswer, match="without the contents"):
        read_answer(written("event", contents=()))
    for end in range(1, len(WHOLE)):
        with pytest.raises(Exception, match=r"(?i)parsing|contents|BYTES"):
            read_answer(WHOLE[:end])
