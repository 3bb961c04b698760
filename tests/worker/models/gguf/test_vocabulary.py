"""The vocabulary of a GGUF file as a ``tokenizer.json``."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from protocol.token_bytes import token_bytes_of
from tests.support.gguf import write_gguf
from worker.errors import TokenizerError, UnsupportedModel
from worker.models.gguf import vocabulary
from worker.models.gguf.file import GgufFile

TEXTS = [
    "The tide waits for no one, said 3 of 1234 men.",
    "  two  blanks\n\n\tand a tab: don't, I'LL, it's Ünïcödé … 你好 ✓",
    "x" * 30 + "\r\n\r\n  end ",
]


@cache
def byte_level() -> dict[str, object]:
    """A vocabulary as GPT-2's, learnt from ``TEXTS``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    merges = [" ".join(merge) for merge in learnt["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<|begin|>", "<|end|>", "<think>", *pieces],
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * len(pieces)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def with_scores() -> dict[str, object]:
    """A vocabulary as Llama 2's: bytes, then pieces with the best first."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁the", "▁t", "he", "▁", "t", "h", "e", "x"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def read(path: Path, metadata: Mapping[str, object]) -> GgufFile:
    return GgufFile(write_gguf(path / "m.gguf", {"general.architecture": "llama"} | metadata))


def built(path: Path, metadata: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_buffer(vocabulary.build_tokenizer(read(path, metadata)))


@pytest.mark.parametrize("name", sorted(vocabulary.PATTERNS))
def test_byte_level_text_comes_back_whole(tmp_path: Path, name: str) -> None:
    tokenizer = built(tmp_path, byte_level() | {"tokenizer.ggml.pre": name})
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text.encode())
    assert token_bytes_of(tokenizer) is not None


def test_families_differ_in_how_they_cut_digits(tmp_path: Path) -> None:
    def cut(name: str) -> list[str]:
        metadata = byte_level() | {"tokenizer.ggml.pre": name}
        before = built(tmp_path, metadata).pre_tokenizer
        return [piece for piece, _ in before.pre_tokenize_str("12345")]

    assert cut("gpt-2") == ["12345"]
    assert cut("llama-bpe") == ["123", "45"]
    assert cut("qwen2") == cut("smollm") == ["1", "2", "3", "4", "5"]


def test_special_tokens_are_found_in_text_and_print_nothing(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, byte_level())
    ids = tokenizer.encode("<think>no<|end|>", add_special_tokens=False).ids
    assert ids[0] == 2 and ids[-1] == 1
    assert tokenizer.decode(ids) == "<think>no"


def test_a_prompt_begins_as_the_file_says(tmp_path: Path) -> None:
    add = "tokenizer.ggml.add_bos_token"
    assert built(tmp_path, byte_level()).encode("no").ids[0] != 0
    assert built(tmp_path, byte_level() | {add: True}).encode("no").ids[0] == 0
    assert built(tmp_path, byte_level() | {"tokenizer.ggml.pre": "llama3"}).encode("").ids == [0]
    assert built(tmp_path, with_scores()).encode("").ids == [1]
    assert built(tmp_path, with_scores() | {add: False}).encode("").ids == []
    both = byte_level() | {add: True, "tokenizer.ggml.add_eos_token": True}
    assert built(tmp_path, both).encode("").ids == [0, 1]


def test_scores_say_what_is_joined_and_the_rest_is_bytes(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, with_scores())
    pieces = tokenizer.encode("the the é", add_special_tokens=False).tokens
    assert pieces == ["▁the", "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("the the é").ids) == "the the é"
    plain = built(tmp_path, with_scores() | {"tokenizer.ggml.add_space_prefix": False})
    assert plain.encode("the", add_special_tokens=False).tokens == ["t", "he"]


def test_the_original_is_believed(tmp_path: Path) -> None:
    original = Tokenizer(models.BPE({"a": 0}, [])).to_str()
    metadata = with_scores() | {vocabulary.ORIGINAL: original}
    assert vocabulary.build_tokenizer(read(tmp_path, metadata)) == original.encode()


def test_what_is_not_known_is_named_with_the_way_round_it(tmp_path: Path) -> None:
    way = "TIDEGATE_WORKER__ENGINE_ARGS='tokenizer=FOLDER'"
    with pytest.raises(UnsupportedModel, match=rf"pre='tekken'\) is not known.*{way}"):
        built(tmp_path, byte_level() | {"tokenizer.ggml.pre": "tekken"})
    with pytest.raises(UnsupportedModel, match=rf"model='t5' is not read.*{way}"):
        built(tmp_path, with_scores() | {"tokenizer.ggml.model": "t5"})
    with pytest.raises(TokenizerError, match=rf"holds no vocabulary.*{way}"):
        built(tmp_path, {})
    with pytest.raises(TokenizerError, match="one for each of the 267 tokens"):
        built(tmp_path, with_scores() | {"tokenizer.ggml.scores": [0.0]})


def test_tokens_with_a_name_are_said_by_their_text(tmp_path: Path) -> None:
    file = read(tmp_path, with_scores() | {"tokenizer.ggml.eot_token_id": 5})
    assert vocabulary.token_settings(file) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert vocabulary.end_ids(file) == [2, 5]
