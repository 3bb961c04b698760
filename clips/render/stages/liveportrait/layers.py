"""Blocks of LivePortrait's networks. Attributes are named as in the published checkpoints."""

import torch
import torch.nn.functional as nn
from torch.nn import (
    BatchNorm2d,
    BatchNorm3d,
    Conv2d,
    Conv3d,
    Linear,
    Module,
    ModuleList,
    Parameter,
    ReLU,
    Sequential,
)

_SLOPE = 0.2
_MODULATION = 128
"""Hidden channels between a modulating feature and its gains."""


class SameBlock2d(Module):
    """Convolution, norm and leaky rectifier; ``slope`` is the factor of negative values."""

    def __init__(self, inputs: int, outputs: int, slope: float = 0.0) -> None:
        super().__init__()
        self.conv = Conv2d(inputs, outputs, 3, padding=1)
        self.norm = BatchNorm2d(outputs)
        self._slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.leaky_relu(self.norm(self.conv(x)), self._slope)


class DownBlock2d(SameBlock2d):
    """A ``SameBlock2d`` followed by pooling to half of the size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.avg_pool2d(super().forward(x), 2)


class ResBlock3d(Module):
    """A residual block of two 3D convolutions, each after its norm and rectifier."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = Conv3d(channels, channels, 3, padding=1)
        self.conv2 = Conv3d(channels, channels, 3, padding=1)
        self.norm1 = BatchNorm3d(channels)
        self.norm2 = BatchNorm3d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(nn.relu(self.norm1(x)))
        return torch.add(x, self.conv2(nn.relu(self.norm2(hidden))))


class _Block3d(Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv3d(inputs, outputs, 3, padding=1)
        self.norm = BatchNorm3d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.relu(self.norm(self.conv(x)))


class Hourglass(Module):
    """A U-Net over ``[n, inputs, depth, height, width]`` whose depth stays as it is."""

    def __init__(self, inputs: int, expansion: int, blocks: int, most: int) -> None:
        super().__init__()
        widths = [min(most, expansion * 2**level) for level in range(blocks + 1)]
        down = [
            _Block3d(inputs if level == 0 else widths[level], widths[level + 1])
            for level in range(blocks)
        ]
        up = [
            _Block3d(widths[level + 1] * (1 if level == blocks - 1 else 2), widths[level])
            for level in reversed(range(blocks))
        ]
        self.channels = widths[0] + inputs
        self.encoder = Module()
        self.encoder.down_blocks = ModuleList(down)
        self.decoder = _Block3d(self.channels, self.channels)
        self.decoder.up_blocks = ModuleList(up)
        self._down, self._up = down, up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self._down:
            skipped.append(x)
            x = block(x)
            # Pooled over height and width only; torch's 3D pooling has no bf16 on the CPU.
            halved = nn.avg_pool2d(x.flatten(1, 2), 2)
            x = halved.view(*x.shape[:3], *halved.shape[2:])
        for block in self._up:
            x = block(nn.interpolate(x, scale_factor=(1, 2, 2)))
            x = torch.cat((x, skipped.pop()), dim=1)
        mixed: torch.Tensor = self.decoder(x)
        return mixed


class _Modulated(Module):
    """SPADE (arXiv 1903.07291): instance norm whose gain and shift come from a feature."""

    def __init__(self, channels: int, feature: int) -> None:
        super().__init__()
        self.mlp_shared = Sequential(Conv2d(feature, _MODULATION, 3, padding=1), ReLU())
        self.mlp_gamma = Conv2d(_MODULATION, channels, 3, padding=1)
        self.mlp_beta = Conv2d(_MODULATION, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        hidden = self.mlp_shared(nn.interpolate(feature, x.shape[2:]))
        modulated: torch.Tensor = nn.instance_norm(x) * (1 + self.mlp_gamma(hidden))
        modulated += self.mlp_beta(hidden)
        return modulated


class ModulatedBlock(Module):
    """Two modulated convolutions with a shortcut. Spectral norms are folded when weights are
    loaded."""

    def __init__(self, inputs: int, outputs: int, feature: int) -> None:
        super().__init__()
        between = min(inputs, outputs)
        self.conv_0 = Conv2d(inputs, between, 3, padding=1)
        self.conv_1 = Conv2d(between, outputs, 3, padding=1)
        self.norm_0 = _Modulated(inputs, feature)
        self.norm_1 = _Modulated(between, feature)
        self._is_changed = inputs != outputs
        if self._is_changed:
            self.conv_s = Conv2d(inputs, outputs, 1, bias=False)
            self.norm_s = _Modulated(inputs, feature)

    def forward(self, x: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        around = self.conv_s(self.norm_s(x, feature)) if self._is_changed else x
        hidden = self.conv_0(nn.leaky_relu(self.norm_0(x, feature), _SLOPE))
        hidden = nn.leaky_relu(self.norm_1(hidden, feature), _SLOPE)
        return torch.add(around, self.conv_1(hidden))


class ChannelNorm(Module):
    """Layer norm over the channels of ``[n, channels, height, width]``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(channels))
        self.bias = Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = nn.layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias, 1e-6)
        return last.movedim(-1, 1)


class _ResponseNorm(Module):
    """GRN (arXiv 2301.00808): channels compete by their energy over the picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = Parameter(torch.zeros(1, 1, 1, channels))
        self.beta = Parameter(torch.zeros(1, 1, 1, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = x.norm(dim=(1, 2), keepdim=True)
        share = energy / (energy.mean(dim=-1, keepdim=True) + 1e-6)
        return torch.addcmul(self.beta + x, self.gamma, x * share)


class ConvNextBlock(Module):
    """The block of ConvNeXt V2 (arXiv 2301.00808)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = torch.nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = Linear(channels, 4 * channels)
        self.grn = _ResponseNorm(4 * channels)
        self.pwconv2 = Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.pwconv1(self.norm(self.dwconv(x).movedim(1, -1)))
        return torch.add(x, self.pwconv2(self.grn(nn.gelu(hidden))).movedim(-1, 1))
