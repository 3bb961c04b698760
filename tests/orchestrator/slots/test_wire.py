"""Answers as Triton writes them, large and small."""

import struct

import pytest
from tritonclient.grpc import service_pb2

from orchestrator.slots import wire
from orchestrator.slots.wire import BadAnswer, read_answer

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


def test_large_answers_are_read_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    small = read_answer(WHOLE)
    assert small is not None and small.event["seconds"] == 1.5
    assert small.tensors == {"mp4": CLIP} and type(small.tensors["mp4"]) is bytes
    empty, bare = written(contents=()), written("event", contents=())
    monkeypatch.setattr(wire, "_LARGE", 0)
    monkeypatch.setattr(service_pb2, "ModelStreamInferResponse", None)  # not by protobuf
    assert read_answer(WHOLE) == small
    assert read_answer(empty) is None
    with pytest.raises(BadAnswer, match="without the contents"):
        read_answer(bare)


def test_what_is_not_as_triton_writes_it_is_left_to_protobuf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_LARGE", 0)
    failed = service_pb2.ModelStreamInferResponse(error_message="no such model")
    found = read_answer(failed.SerializeToString())
    assert found is not None and found.error == "no such model"
    for end in range(1, len(WHOLE)):
        with pytest.raises(Exception, match=r"(?i)parsing|contents|BYTES"):
            read_answer(WHOLE[:end])
    number = b"\x98\x06\x01"  # field 99, of a newer server
    assert wire._cut(WHOLE + number) is None
    assert read_answer(WHOLE + number) == read_answer(WHOLE)
