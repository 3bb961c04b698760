"""The check by two CLIP models (SL-7), with tiny ones of random weights."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from clips.render.stages.clip import ClipCheck
from tests.clips.render.checkpoints import save_clip
from worker.errors import BrokenCheckpoint, LoadError, UnsupportedModel

# Looked for, not imported: each process that collects this would take four seconds for it.
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the check by CLIP: tidegate[slot-clip]"
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("clip")
    return str(save_clip(root / "a", 1)), str(save_clip(root / "b", 2, image_size=48))


def keyframes(count: int = 5, size: int = 64) -> torch.Tensor:
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    return (torch.nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 1) * 255).byte()


@pytest.mark.slow
def test_scores_are_clip_scores_of_each_keyframe(folders: tuple[str, str]) -> None:
    """2.5 times the model's own cosine, from pictures as its own preprocessing has them."""
    from PIL import Image
    from transformers import AutoTokenizer, CLIPModel

    frames, asked = keyframes(), []
    scores = ClipCheck(CPU, folders, "fp32").score("red hair", frames, asked.append)
    assert asked[0] == 0.0 and asked[-1] == 1.0 and len(asked) >= 3
    for folder, found, size in zip(folders, scores, (32, 48), strict=True):
        model = CLIPModel.from_pretrained(folder).eval()
        pictures = json.loads((Path(folder) / "preprocessor_config.json").read_text())
        mean, deviation = (
            torch.tensor(pictures[key])[:, None, None] for key in ("image_mean", "image_std")
        )
        pixels = []
        for frame in frames:
            small = Image.fromarray(frame.permute(1, 2, 0).numpy()).resize((size, size), 3)
            plane = torch.tensor(list(small.tobytes()), dtype=torch.float32)
            pixels.append((plane.view(size, size, 3).permute(2, 0, 1) / 255 - mean) / deviation)
        words = AutoTokenizer.from_pretrained(folder)("red hair", return_tensors="pt")
        with torch.inference_mode():
            logits = model(pixel_values=torch.stack(pixels), **words).logits_per_image[:, 0]
            cosines = logits / model.logit_scale.exp()
        assert found.model == Path(folder).name and len(found.scores) == 5
        expected = (2.5 * cosines).clamp(0, 1).tolist()
        assert found.scores == pytest.approx(expected, abs=0.02)


def test_residents_add_up_to_the_models_at_their_precision(folders: tuple[str, str]) -> None:
    full, half = (ClipCheck(CPU, folders, which).residents() for which in ("fp32", "bf16"))
    assert [each.name for each in full] == ["a", "b"]
    assert [each.precision for each in half] == ["bf16", "bf16"]
    for whole, part in zip(full, half, strict=True):
        assert part.bytes < 0.6 * whole.bytes


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="clip of TIDEGATE_SLOT__FOLDERS must be two folders"):
        ClipCheck(CPU, ())
    with pytest.raises(BrokenCheckpoint, match="is not a folder"):
        ClipCheck(CPU, (str(tmp_path / "none"), str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    with pytest.raises(
        BrokenCheckpoint, match=r"preprocessor_config\.json, tokenizer\.json or vocab\.json"
    ):
        ClipCheck(CPU, (str(tmp_path), str(tmp_path)))
    for name in ("preprocessor_config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedModel, match="of type 'siglip', not 'clip'"):
        ClipCheck(CPU, (str(tmp_path), str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(BrokenCheckpoint, match=str(tmp_path)):
        ClipCheck(CPU, (str(tmp_path), str(tmp_path)))


def test_weights_that_are_missing_are_not_made_up(folders: tuple[str, str], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders[0], tmp_path / "a")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"lacks the weights visual_projection\.weight"):
        ClipCheck(CPU, (str(tmp_path / "a"), folders[1]))
