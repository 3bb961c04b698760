"""Checkpoints in Hugging Face layout, written as GGUF."""

import os
from pathlib import Path

import pytest

from tests.support.checkpoints import DEMO, LLAMA3_ROPE, edit_config, make_checkpoint

pytest.importorskip("gguf", reason="extra llamacpp: not installed")

from tools.to_gguf import TYPES, convert, main
from worker.engines.llamacpp import vocabulary
from worker.engines.llamacpp.gguf_file import GgufFile
from worker.errors import LoadError, UnsupportedModel
from worker.text import Tokenizer


@pytest.mark.parametrize("kind", TYPES)
def test_the_demo_checkpoint_says_what_it_said_before(tmp_path: Path, kind: str) -> None:
    assert main([str(DEMO), str(tmp_path / "demo.gguf"), "--type", kind]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["demo.gguf"]
    file = GgufFile(tmp_path / "demo.gguf")
    assert (file.architecture, file.of_model("block_count")) == ("llama", 4)
    assert file.of_model("context_length") == 2048
    assert vocabulary.end_ids(file) == [1, 5]
    original = Tokenizer.from_directory(DEMO)
    assert vocabulary.build_tokenizer(file) == original.json
    assert vocabulary.chat_template(file) == original.chat_template
    assert vocabulary.token_settings(file)["bos_token"] == "<|bos|>"


def test_a_file_has_its_name_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []

    def told(number: int) -> None:
        assert not (tmp_path / "demo.gguf").exists()
        synced.append((os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_size))

    monkeypatch.setattr(os, "fsync", told)
    convert(DEMO, tmp_path / "demo.gguf")
    whole = (tmp_path / "demo.gguf").stat().st_size
    assert synced == [(str(tmp_path / "demo.gguf.part"), whole)]


def test_the_vocabulary_alone_reads_texts_alike(tmp_path: Path) -> None:
    """Without the original, which a file from elsewhere does not carry."""
    convert(DEMO, tmp_path / "demo.gguf", "q8_0")
    file = GgufFile(tmp_path / "demo.gguf")
    file.values.pop(vocabulary.ORIGINAL)
    built = Tokenizer(vocabulary.build_tokenizer(file), {}, "")
    original = Tokenizer.from_directory(DEMO)
    for text in ("Once upon a time, there was a girl.\n\nShe had 3 cats!", "é ✓ <|user|>Hi<|end|>"):
        assert built.encode(text) == original.encode(text)


def test_a_stretch_of_positions_is_kept(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama3", "llama", rope_parameters=LLAMA3_ROPE)
    convert(folder, tmp_path / "m.gguf")
    assert b"rope_freqs.weight" in (tmp_path / "m.gguf").read_bytes()


def test_what_llama_cpp_cannot_do_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "mistral", "mistral", sliding_window=16)
    with pytest.raises(UnsupportedModel, match="sliding windows"):
        convert(folder, tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match="'q2_k' is not written here"):
        convert(DEMO, tmp_path / "m.gguf", "q2_k")
    edit_config(folder, architectures=["BertModel"])
    assert main([str(folder), str(tmp_path / "m.gguf")]) == 1
    with pytest.raises(LoadError):
        convert(tmp_path / "nothing", tmp_path / "m.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["mistral"]
