"""Talking faces by LivePortrait, with tiny networks of random weights."""

from pathlib import Path

import pytest
import torch

from clips.plan.plan import SAMPLE_RATE, ClipPlan
from clips.render.stages.liveportrait.networks import PUBLISHED
from clips.render.stages.liveportrait.provider import LivePortraitVideo, folded, make_networks
from tests.clips.render.checkpoints import TINY_FACE, save_portrait_networks
from worker.errors import BrokenCheckpoint, LoadError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FRAMES = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_portrait_networks(tmp_path_factory.mktemp("liveportrait"), TINY_FACE)


def rendered(provider: LivePortraitVideo, size: int = 128) -> torch.Tensor:
    """A second, loud in its second half."""
    plan = ClipPlan(seconds=1.0, fps=FRAMES, size=size, has_check=False)
    generator = torch.Generator().manual_seed(1)
    actor = torch.rand(3, 96, 96, generator=generator)
    audio = torch.rand(SAMPLE_RATE, generator=generator) - 0.5
    audio[: SAMPLE_RATE // 2] = 0
    video = torch.zeros(FRAMES, 3, size, size, dtype=torch.uint8)
    shares: list[float] = []
    with torch.inference_mode():
        provider.render(plan, actor, audio, video, shares.append)
    assert shares[0] == 0.0 and shares[-1] == 1.0 and shares == sorted(shares)
    assert len(shares) == 2 + -(-FRAMES // 4)  # before it, batches of four, behind it
    return video


def test_names_of_weights_are_the_published_ones() -> None:
    networks = make_networks(PUBLISHED, torch.device("meta"), torch.float32)
    shapes = {
        name: {key: tuple(value.shape) for key, value in network.state_dict().items()}
        for name, network in networks._asdict().items()
    }
    for name, key, shape in (
        ("appearance", "down_blocks.1.norm.running_mean", (256,)),
        ("appearance", "resblocks_3d.3dr5.conv2.weight", (32, 32, 3, 3, 3)),
        ("motion", "detector.downsample_layers.0.1.weight", (96,)),
        ("motion", "detector.stages.2.8.grn.gamma", (1, 1, 1, 1536)),
        ("motion", "detector.fc_exp.weight", (63, 768)),
        ("warping", "dense_motion_network.hourglass.encoder.down_blocks.4.conv.weight",
         (1024, 512, 3, 3, 3)),
        ("warping", "dense_motion_network.hourglass.decoder.up_blocks.1.conv.weight",
         (256, 1024, 3, 3, 3)),
        ("warping", "dense_motion_network.hourglass.decoder.norm.weight", (142,)),
        ("warping", "dense_motion_network.occlusion.weight", (1, 2272, 7, 7)),
        ("generator", "G_middle_5.norm_1.mlp_shared.0.weight", (128, 256, 3, 3)),
        ("generator", "up_1.conv_s.weight", (64, 256, 1, 1)),
        ("generator", "conv_img.0.weight", (12, 64, 3, 3)),
        ("retargeting", "retarget_eye.mlp.10.weight", (63, 64)),
        ("retargeting", "retarget_shoulder.mlp.0.weight", (128, 126)),
    ):  # fmt: skip
        assert shapes[name][key] == shape


def test_both_layouts_of_weights_render_the_same(folder: Path, tmp_path: Path) -> None:
    save_portrait_networks(tmp_path, TINY_FACE, safetensors=True)
    one, other = (
        rendered(LivePortraitVideo.load(CPU, str(each), "fp32", TINY_FACE))
        for each in (folder, tmp_path)
    )
    assert torch.equal(one, other) and not torch.equal(one[0], one[-1])


def test_a_spectral_norm_is_folded_into_its_weight() -> None:
    convolution = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Conv2d(6, 4, 3))
    for _ in range(3):
        convolution(torch.zeros(1, 6, 3, 3))
    convolution.eval()
    norm = convolution.parametrizations.weight
    state = {
        "conv_0.weight_orig": norm.original.detach(),
        "conv_0.weight_u": norm[0]._u,
        "conv_0.weight_v": norm[0]._v,
        "conv_0.bias": convolution.bias.detach(),
    }
    plain = folded(state)
    assert set(plain) == {"conv_0.weight", "conv_0.bias"}
    torch.testing.assert_close(plain["conv_0.weight"], convolution.weight.detach())


def test_files_that_are_missing_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="liveportrait of TIDEGATE_SLOT__FOLDERS is not set"):
        LivePortraitVideo.load(CPU, "")
    (tmp_path / "motion_extractor.pth").write_bytes(b"")
    with pytest.raises(BrokenCheckpoint) as error:
        LivePortraitVideo.load(CPU, str(tmp_path))
    assert "appearance_feature_extractor.pth or .safetensors, warping_module" in str(error.value)
    assert "motion_extractor" not in str(error.value)
    with pytest.raises(BrokenCheckpoint, match=r"extractor\.pth: .*resblocks_3d\.3dr1"):
        LivePortraitVideo.load(CPU, str(folder))
