"""What a GGUF file would not say is refused before it is written, also without the package gguf."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import LLAMA3_ROPE, YARN, make_checkpoint
from tools.to_gguf import convert
from worker.errors import BrokenCheckpoint, UnsupportedModel


@pytest.mark.parametrize(
    ("kind", "rope", "field"),
    [
        ("llama", YARN | {"truncate": False}, "truncate"),
        ("llama", YARN | {"beta_fast": 16.0}, "beta_fast"),
        ("qwen2", YARN | {"beta_slow": 2.0}, "beta_slow"),
        ("qwen2", LLAMA3_ROPE, "rope_type llama3"),
        ("qwen3", LLAMA3_ROPE, "rope_type llama3"),
    ],
)
def test_a_stretch_that_llama_cpp_does_otherwise_is_refused_by_name(
    tmp_path: Path, kind: str, rope: dict[str, object], field: str
) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", kind, rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=f"does not heed {field} of the rope settings"):
        convert(folder, tmp_path / "m.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_weight_that_is_missing_is_said(tmp_path: Path, lost: str) -> None:
    """llama.cpp takes the embedding for a head that is not there."""
    folder = make_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=f"lack 1 tensors \\({lost}"):
        convert(folder, tmp_path / "m.gguf")
