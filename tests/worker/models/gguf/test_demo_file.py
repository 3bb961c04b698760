"""The demo checkpoint as a GGUF file, read back."""

from pathlib import Path

import pytest

from tests.support.checkpoints import DEMO
from tests.support.to_gguf import TYPES, convert
from worker.models.gguf import vocabulary
from worker.models.gguf.file import GgufFile
from worker.text import Tokenizer

pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.mark.parametrize("kind", TYPES)
def test_the_demo_checkpoint_says_what_it_said_before(tmp_path: Path, kind: str) -> None:
    convert(DEMO, tmp_path / "demo.gguf", kind)
    file = GgufFile(tmp_path / "demo.gguf")
    assert (file.architecture, file.of_model("block_count")) == ("llama", 4)
    assert file.of_model("context_length") == 2048
    assert vocabulary.end_ids(file) == [1, 5]
    original = Tokenizer.from_directory(DEMO)
    assert vocabulary.build_tokenizer(file) == original.json
    assert vocabulary.chat_template(file) == original.chat_template
    assert vocabulary.token_settings(file)["bos_token"] == "<|bos|>"


def test_the_vocabulary_alone_reads_texts_alike(tmp_path: Path) -> None:
    """Without the original, which a file from elsewhere does not carry."""
    convert(DEMO, tmp_path / "demo.gguf", "q8_0")
    file = GgufFile(tmp_path / "demo.gguf")
    file.values.pop(vocabulary.ORIGINAL)
    built = Tokenizer(vocabulary.build_tokenizer(file), {}, "")
    original = Tokenizer.from_directory(DEMO)
    for text in ("Once upon a time, there was a girl.\n\nShe had 3 cats!", "é ✓ <|user|>Hi<|end|>"):
        assert built.encode(text) == original.encode(text)
