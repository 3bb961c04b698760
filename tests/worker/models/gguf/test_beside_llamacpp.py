"""Vocabularies cut texts as llama.cpp itself does, whose server is asked."""

import json
import urllib.request
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.llamacpp import demo_gguf, llamacpp_server, skip_without_llamacpp
from tests.support.tokenizers_of_all_kinds import _corpus, byte_level
from worker.models.gguf import vocabulary
from worker.models.gguf.file import GgufFile
from worker.text import Tokenizer

pytestmark = pytest.mark.slow

STORY = "Once upon a time there was a little girl who"


def built(path: Path) -> Tokenizer:
    """Of the vocabulary alone, without the original."""
    file = GgufFile(path)
    file.values.pop(vocabulary.ORIGINAL)
    return Tokenizer(vocabulary.build_tokenizer(file), {}, "")


def theirs(port: int, text: str) -> list[int]:
    asked = {"content": text, "add_special": False, "parse_special": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/tokenize", json.dumps(asked).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["tokens"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", sorted(vocabulary.PATTERNS))
def test_texts_are_cut_as_llama_cpp_cuts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    skip_without_llamacpp()
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.support import to_gguf

    folder = make_checkpoint(tmp_path / "checkpoint", "qwen2", vocab_size=1600)
    byte_level().save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(to_gguf, "_pattern_name", lambda stated: name)
    file = tmp_path / "m.gguf"
    to_gguf.convert(folder, file)
    tokenizer = built(file)
    texts = [*_corpus()[:20], "don't I'LL 1234 3.5\r\n\r\n\t x  y   z … ✓ naïve 12345 <=> a_b $5"]
    with llamacpp_server(file, tmp_path / "log") as server:
        for text in texts:
            ours = tokenizer.encode(text, add_special_tokens=False)
            assert ours == theirs(server.port, text)


def test_scores_are_read_as_llama_cpp_reads_them(tmp_path: Path) -> None:
    file = demo_gguf(tmp_path)
    tokenizer = built(file)
    with llamacpp_server(file, tmp_path / "log") as server:
        for text in (STORY, "Two cats.\n\n“Hello”, said 3 dogs; é ✓!"):
            ours = tokenizer.encode(text, add_special_tokens=False)
            assert ours == theirs(server.port, text)
