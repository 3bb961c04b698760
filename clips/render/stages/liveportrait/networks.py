"""LivePortrait's networks: appearance (F in the paper), motion (M), warping (W), generator (G), and
the three small ones for stitching and retargeting (S, R).

Shapes are those of the published sizes: ``n`` frames, 21 keypoints; ``[…, 3]`` is x, y, z.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as nn
from torch.nn import (
    BatchNorm3d,
    Conv2d,
    Conv3d,
    LayerNorm,
    Linear,
    Module,
    ModuleList,
    PixelShuffle,
    ReLU,
    Sequential,
)

from clips.render.stages.liveportrait.layers import (
    ChannelNorm,
    ConvNextBlock,
    DownBlock2d,
    Hourglass,
    ModulatedBlock,
    ResBlock3d,
    SameBlock2d,
)

_VARIANCE = 0.01
"""Variance of the Gaussian around a keypoint, in coordinates from -1 to 1."""


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """Sizes of the networks; the defaults are the published ones."""

    keypoints: int = 21
    picture: int = 256
    """Pixels of either side of the input; the output has twice as many."""
    expansion: int = 64
    depth: int = 16
    volume: int = 32
    """Channels of the volume; the picture has ``volume * depth`` before it is reshaped to it."""
    residual_blocks: int = 6
    motion_depths: tuple[int, ...] = (3, 3, 9, 3)
    motion_widths: tuple[int, ...] = (96, 192, 384, 768)
    angle_bins: int = 66
    flow_expansion: int = 32
    flow_blocks: int = 5
    flow_most: int = 1024
    flow_compressed: int = 4
    middle_blocks: int = 6
    stitching_hidden: tuple[int, ...] = (128, 128, 64)
    lips_hidden: tuple[int, ...] = (128, 128, 64)
    eyes_hidden: tuple[int, ...] = (256, 256, 128, 128, 64)

    @property
    def channels(self) -> int:
        return self.volume * self.depth

    @property
    def warped(self) -> int:
        """Channels of the warped features, at a quarter of the picture's size."""
        return 4 * self.expansion


PUBLISHED = NetworkSizes()


class Appearance(Module):
    """Maps a picture ``[1, 3, 256, 256]``, 0 to 1, to a volume ``[1, 32, 16, 64, 64]``."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        self._shape = sizes.volume, sizes.depth
        width = sizes.expansion
        self.first = SameBlock2d(3, width)
        self.down_blocks = ModuleList(
            [DownBlock2d(width, 2 * width), DownBlock2d(2 * width, 4 * width)]
        )
        self.second = Conv2d(4 * width, sizes.channels, 1)
        blocks = {f"3dr{n}": ResBlock3d(sizes.volume) for n in range(sizes.residual_blocks)}
        self.resblocks_3d = Sequential(OrderedDict(blocks))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        x = self.first(picture)
        for block in self.down_blocks:
            x = block(x)
        volume: torch.Tensor = self.resblocks_3d(self.second(x).unflatten(1, self._shape))
        return volume


@dataclass(frozen=True, slots=True)
class Pose:
    """A head's pose, as the motion network finds it in a picture. Angles are in degrees."""

    pitch: torch.Tensor
    yaw: torch.Tensor
    roll: torch.Tensor
    """``[1]``, like ``pitch`` and ``yaw``."""
    shift: torch.Tensor
    """``[1, 3]``."""
    scale: torch.Tensor
    """``[1, 1]``."""
    expression: torch.Tensor
    """``[1, 21, 3]``: how keypoints differ from those of a face at rest."""
    keypoints: torch.Tensor
    """``[1, 21, 3]``: canonical positions."""


class _ConvNext(Module):
    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        widths = sizes.motion_widths
        self.downsample_layers = ModuleList(
            [
                Sequential(Conv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0])),
                *(
                    Sequential(ChannelNorm(a), Conv2d(a, b, 2, stride=2))
                    for a, b in pairwise(widths)
                ),
            ]
        )
        self.stages = ModuleList(
            Sequential(*(ConvNextBlock(width) for _ in range(depth)))
            for depth, width in zip(sizes.motion_depths, widths, strict=True)
        )
        self.norm = LayerNorm(widths[-1], eps=1e-6)
        for name, outputs in (
            ("kp", 3 * sizes.keypoints),
            ("exp", 3 * sizes.keypoints),
            ("scale", 1),
            ("t", 3),
            *((angle, sizes.angle_bins) for angle in ("pitch", "yaw", "roll")),
        ):
            setattr(self, f"fc_{name}", Linear(widths[-1], outputs))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        x = picture
        for down, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(down(x))
        pooled: torch.Tensor = self.norm(x.mean((-2, -1)))
        return pooled


class Motion(Module):
    """Maps a picture ``[1, 3, 256, 256]``, 0 to 1, to its ``Pose``."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        self.detector = _ConvNext(sizes)

    def forward(self, picture: torch.Tensor) -> Pose:
        x = self.detector(picture)
        heads: Any = self.detector
        pitch, yaw, roll = (
            _degrees(head(x)) for head in (heads.fc_pitch, heads.fc_yaw, heads.fc_roll)
        )
        return Pose(
            pitch,
            yaw,
            roll,
            shift=heads.fc_t(x),
            scale=heads.fc_scale(x),
            expression=heads.fc_exp(x).view(len(x), -1, 3),
            keypoints=heads.fc_kp(x).view(len(x), -1, 3),
        )


def _degrees(bins: torch.Tensor) -> torch.Tensor:
    """Mean angle over bins of 3 degrees, the first of which is at -97.5 (of 66)."""
    middles = torch.arange(bins.shape[1], device=bins.device, dtype=bins.dtype)
    return (bins.softmax(1) * middles).sum(1) * 3 - 97.5


class _DenseMotion(Module):
    """Predicts where in the source's volume each voxel of a frame comes from."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        fields = sizes.keypoints + 1
        self.hourglass = Hourglass(
            fields * (sizes.flow_compressed + 1),
            sizes.flow_expansion,
            sizes.flow_blocks,
            sizes.flow_most,
        )
        self.mask = Conv3d(self.hourglass.channels, fields, 7, padding=3)
        self.compress = Conv3d(sizes.volume, sizes.flow_compressed, 1)
        self.norm = BatchNorm3d(sizes.flow_compressed)
        self.occlusion = Conv2d(self.hourglass.channels * sizes.depth, 1, 7, padding=3)

    def forward(
        self, volume: torch.Tensor, driving: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions ``[n, 16, 64, 64, 3]`` from -1 to 1 in the one ``volume`` of all ``n`` frames,
        and visibility ``[n, 1, 64, 64]``, 0 to 1."""
        compressed = self.norm(self.compress(volume)).relu()
        frames, shape = driving.shape[0], volume.shape[2:]
        grid = _grid(shape, volume.device)
        moves = (source - driving)[:, :, None, None, None]
        moves = torch.cat((torch.zeros_like(moves[:, :1]), moves), dim=1)
        flows = grid + moves  # [n, 22, 16, 64, 64, 3]; the first is where nothing moves
        # All fields of all frames are sampled in one call: they share the volume.
        deformed = nn.grid_sample(
            compressed.float().expand(flows.shape[0] * flows.shape[1], -1, -1, -1, -1),
            flows.flatten(0, 1),
            align_corners=False,
        ).view(*flows.shape[:2], -1, *shape)
        heat = _gaussians(driving, grid) - _gaussians(source, grid)
        heat = torch.cat((torch.zeros_like(heat[:, :1]), heat), dim=1)
        seen = torch.cat((heat[:, :, None], deformed), dim=2).flatten(1, 2)
        predicted = self.hourglass(seen.to(volume.dtype))
        shares = self.mask(predicted).float().softmax(1)
        positions = torch.einsum("nkdhw,nkdhwc->ndhwc", shares, flows)
        visible = self.occlusion(predicted.reshape(frames, -1, *shape[1:])).sigmoid()
        return positions, visible


def _grid(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Positions ``[depth, height, width, 3]`` from -1 to 1, corner to corner."""
    axes = [torch.linspace(-1, 1, length, device=device) for length in shape]
    z, y, x = torch.meshgrid(*axes, indexing="ij")
    return torch.stack((x, y, z), dim=-1)


def _gaussians(keypoints: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Gaussians around keypoints, ``[n, 21, depth, height, width]``."""
    apart = grid - keypoints[:, :, None, None, None]
    return torch.exp(apart.square().sum(-1) / (-2 * _VARIANCE))


class Warping(Module):
    """Warps a volume by keypoints to features ``[n, 256, 64, 64]``."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        self.dense_motion_network = _DenseMotion(sizes)
        self.third = SameBlock2d(sizes.channels, sizes.warped, slope=0.01)
        self.fourth = Conv2d(sizes.warped, sizes.warped, 1)

    def forward(
        self, volume: torch.Tensor, driving: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        """``volume``: one; ``driving`` ``[n, 21, 3]``, ``source`` ``[1, 21, 3]``, float32."""
        positions, visible = self.dense_motion_network(volume, driving, source)
        warped = nn.grid_sample(
            volume.float().expand(len(driving), -1, -1, -1, -1), positions, align_corners=False
        )
        features = self.fourth(self.third(warped.flatten(1, 2).to(volume.dtype)))
        return torch.mul(features, visible)


class Generator(Module):
    """Maps features to frames ``[n, 3, 512, 512]``, 0 to 1."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        feature = sizes.warped
        self.fc = Conv2d(feature, 2 * feature, 3, padding=1)
        self._middle = [
            ModulatedBlock(2 * feature, 2 * feature, feature) for _ in range(sizes.middle_blocks)
        ]
        for number, block in enumerate(self._middle):
            self.add_module(f"G_middle_{number}", block)
        self.up_0 = ModulatedBlock(2 * feature, feature, feature)
        self.up_1 = ModulatedBlock(feature, sizes.expansion, feature)
        self.conv_img = Sequential(Conv2d(sizes.expansion, 12, 3, padding=1), PixelShuffle(2))

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        x = self.fc(feature)
        for block in self._middle:
            x = block(x, feature)
        for block in (self.up_0, self.up_1):
            x = block(nn.interpolate(x, scale_factor=2), feature)
        return torch.sigmoid(self.conv_img(nn.leaky_relu(x, 0.2)))


class Offsets(Module):
    """Maps keypoints and conditions, flattened, to how far the keypoints have to move."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        layers: list[Module] = []
        for a, b in pairwise((inputs, *hidden)):
            layers += [Linear(a, b), ReLU()]
        self.mlp = Sequential(*layers, Linear(hidden[-1], outputs))

    def forward(self, wanted: torch.Tensor) -> torch.Tensor:
        offsets: torch.Tensor = self.mlp(wanted)
        return offsets


class Retargeting(Module):
    """Stitching keeps the shoulders where they are when the head moves; retargeting opens lips and
    eyes as far as asked for."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        flat = 3 * sizes.keypoints
        self.retarget_shoulder = Offsets(2 * flat, sizes.stitching_hidden, flat + 2)
        self.retarget_mouth = Offsets(flat + 2, sizes.lips_hidden, flat)
        self.retarget_eye = Offsets(flat + 3, sizes.eyes_hidden, flat)

    def stitched(self, source: torch.Tensor, driving: torch.Tensor) -> torch.Tensor:
        """Stitch ``driving`` keypoints ``[n, 21, 3]`` to ``source`` ``[1, 21, 3]``."""
        both = torch.cat((source.expand_as(driving).flatten(1), driving.flatten(1)), dim=1)
        offsets = self.retarget_shoulder(both)
        moved = driving + offsets[:, :-2].view_as(driving)
        return torch.cat((moved[..., :2] + offsets[:, None, -2:], moved[..., 2:]), dim=-1)

    def lips(self, source: torch.Tensor, opened: torch.Tensor, now: float) -> torch.Tensor:
        """Offsets ``[n, 21, 3]`` that open lips from ``now`` to ``opened``, ``[n]``: the gap over
        the mouth's width."""
        return self._offsets(self.retarget_mouth, source, torch.full_like(opened, now), opened)

    def eyes(self, source: torch.Tensor, opened: torch.Tensor, now: float) -> torch.Tensor:
        """Offsets ``[n, 21, 3]`` that open both eyes from ``now`` to ``opened`` ``[n]``: the gap
        over the eye's width."""
        is_now = torch.full_like(opened, now)
        return self._offsets(self.retarget_eye, source, is_now, is_now, opened)

    @staticmethod
    def _offsets(network: Offsets, source: torch.Tensor, *ratios: torch.Tensor) -> torch.Tensor:
        wanted = torch.stack(ratios, dim=1)
        flat = source.flatten(1).expand(len(wanted), -1)
        offsets: torch.Tensor = network(torch.cat((flat, wanted), dim=1))
        return offsets.view(len(wanted), -1, 3)
