"""Weights of a GGUF file as a checkpoint for our own engine (PV-3)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import DEMO, LLAMA3_ROPE, ROPE, make_checkpoint
from tests.support.gguf import write_gguf
from tests.support.to_gguf import TYPES, convert
from worker.errors import BrokenCheckpoint, CheckpointError, UnsupportedModel
from worker.models.config import read_config
from worker.models.gguf import vocabulary
from worker.models.gguf.__main__ import write_checkpoint
from worker.models.gguf.file import GgufFile
from worker.models.gguf.weights import plan_weights, write_weights
from worker.text import Tokenizer

_YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": _YARN}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_checkpoint_comes_back_as_it_was(
    tmp_path: Path, model_type: str, changes: dict[str, object]
) -> None:
    source = make_checkpoint(tmp_path, model_type, **changes)
    convert(source, tmp_path / "m.gguf", "f32")
    write_checkpoint(GgufFile(tmp_path / "m.gguf"), tmp_path / "made")
    before, after = read_config(source), read_config(tmp_path / "made")
    for name in before.__slots__:
        # Mistral's weights are Llama's there; the tokenizer has no first token to tell.
        if name not in ("architecture", "dtype", "bos_token_id"):
            assert getattr(after, name) == getattr(before, name), name
    made = load_file(tmp_path / "made" / "model.safetensors")
    originals = load_file(source / "model.safetensors")
    assert made.keys() == originals.keys()
    assert all(torch.equal(made[n], originals[n].to(torch.bfloat16)) for n in originals)


@pytest.mark.parametrize(("kind", "error"), [("f16", 0.0), ("q8_0", 0.01)])
def test_what_was_quantized_comes_as_bfloat16(tmp_path: Path, kind: str, error: float) -> None:
    convert(DEMO, tmp_path / "demo.gguf", kind)
    told: list[int] = []
    plan = plan_weights(GgufFile(tmp_path / "demo.gguf"))
    write_weights(plan, tmp_path / "model.safetensors", told.append)
    made = load_file(tmp_path / "model.safetensors")
    assert sum(told) == plan.bytes == sum(each.nbytes for each in made.values())
    for name, original in load_file(DEMO / "model.safetensors").items():
        assert (made[name].float() - original.float()).norm() <= (error + 4e-3) * original.norm()


_HEAD = {"general.architecture": "llama", "llama.block_count": 1}


@pytest.mark.parametrize(
    ("metadata", "kind", "said"),
    [
        ({"general.architecture": "gemma2"}, UnsupportedModel, "architecture 'gemma2'; only"),
        (_HEAD | {"general.type": "adapter"}, UnsupportedModel, "is a adapter of"),
        (_HEAD, BrokenCheckpoint, r"lacks the tensors blk\.0\.attn_k\.weight, .* and 8 more"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, metadata: dict[str, object], kind: type[CheckpointError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        plan_weights(GgufFile(write_gguf(tmp_path / "m.gguf", metadata)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.expert_count": 8}, "expert_count=8 is not read here"),
        ({"llama.rope.scaling.type": "longrope"}, "type='longrope' is not read here"),
    ],
)
def test_what_a_model_needs_more_is_named(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    convert(make_checkpoint(tmp_path), tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    file.values |= changes
    with pytest.raises(UnsupportedModel, match=said):
        plan_weights(file)


def test_tensors_that_an_architecture_has_not_are_named(tmp_path: Path) -> None:
    convert(make_checkpoint(tmp_path, "qwen2"), tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    file.architecture = "llama"
    with pytest.raises(UnsupportedModel, match=r"llama has not: blk\.0\.attn_k\.bias"):
        plan_weights(file)


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
