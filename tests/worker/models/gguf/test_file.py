"""What a GGUF file says of itself."""

import struct
from pathlib import Path

import pytest

from tests.support.gguf import write_gguf
from worker.errors import BrokenCheckpoint
from worker.models.gguf.file import GgufFile

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.attention.head_count_kv": [2, 0, 8],
    "general.sampling.temp": 0.5,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["<s>", "Ünï", ""],
}


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_kind_is_read(tmp_path: Path, version: int) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", METADATA, version))
    assert file.architecture == "llama"
    assert file.of_model("block_count") == 4
    assert file.of_model("attention.head_count_kv") == 8
    assert file.of_model("context_length", 7) == 7
    assert file.values["general.sampling.temp"] == 0.5
    assert file.flag("tokenizer.ggml.add_bos_token", False) is True
    assert file.texts("tokenizer.ggml.tokens") == ["<s>", "Ünï", ""]
    assert file.text("general.name", "none") == "none"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cannot be read as GGUF"),
        (b"PK\x03\x04" + b"\0" * 40, "does not begin with GGUF"),
        (b"GGUF\x09\0\0\0" + b"\0" * 16, "version 9"),
        (b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\xff" * 8, "pairs and"),
    ],
)
def test_what_is_no_gguf_is_said(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(BrokenCheckpoint, match=problem):
        GgufFile(path)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (struct.pack("<IIQ", 9, 9, 1) * 5000, "array of arrays"),
        (struct.pack("<IIQ", 9, 0, 2**63), "an array of 9223372036854775808 values"),
        (struct.pack("<IIQ", 9, 0, 2**24 + 1) + bytes(2**24 + 1), "an array of 16777217 values"),
        (struct.pack("<IQ", 8, 2**63), "the file is cut"),
    ],
    ids=["nested", "without end", "more than memory bears", "a text without end"],
)
def test_what_a_file_claims_to_hold_is_not_believed(
    tmp_path: Path, value: bytes, problem: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1) + b"x" + value)
    with pytest.raises(BrokenCheckpoint, match=problem):
        GgufFile(path)


def test_a_text_that_is_no_utf8_can_still_be_sent(tmp_path: Path) -> None:
    """A card that cannot be encoded would leave a worker whose lanes never open."""
    metadata = METADATA | {"tokenizer.chat_template": "a \udcff b"}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", metadata))
    assert file.text("tokenizer.chat_template") == "a \ufffd b"


def test_a_file_cut_anywhere_in_its_metadata_is_refused(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "whole.gguf", METADATA).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(BrokenCheckpoint, match=r"cut\.gguf"):
            GgufFile(path)


def test_a_value_of_another_kind_names_its_key(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", "x": 3}))
    with pytest.raises(BrokenCheckpoint, match="x is a int, expected str"):
        file.text("x")
