"""The example of docs/extending.md: an architecture is one entry in ``families`` and a module."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.examples.scaled_decoder import ScaledDecoder
from tests.support.checkpoints import edit_config, make_checkpoint
from tests.support.model import Rig
from worker.errors import UnsupportedModel
from worker.models.config import read_config
from worker.models.families import FAMILIES, Family

NAME = "ScaledForCausalLM"
IDS = [5, 17, 250, 3]


def logits_of(path: Path) -> torch.Tensor:
    rig = Rig(path)
    (logits,) = rig.step((rig.text(IDS), len(IDS)))
    return logits


def test_an_architecture_is_added_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are those of a Llama whose table of embeddings holds the scaled ones."""
    path = make_checkpoint(tmp_path)
    weights = load_file(path / "model.safetensors")
    scaled = {**weights, "model.embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
    scaled["model.embed_tokens.weight"] *= math.sqrt(48)
    save_file(scaled, path / "model.safetensors", {"format": "pt"})
    expected = logits_of(path)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert not torch.allclose(logits_of(path), expected, atol=1e-2)

    edit_config(path, architectures=[NAME])
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, NAME, Family(decoder="tests.examples.scaled_decoder"))
        assert isinstance(Rig(path).model, ScaledDecoder)
        torch.testing.assert_close(logits_of(path), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedModel, match=NAME):
        read_config(path)
