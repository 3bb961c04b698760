"""A talking face by LivePortrait: its head sways, its lips follow the sound, its eyes blink.

The published weights are read from a downloaded folder: ``.pth`` in the layout of
huggingface.co/KwaiVGI/LivePortrait, or ``.safetensors`` side by side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nn
from safetensors.torch import load_file

from clips.plan.plan import ClipPlan
from clips.render.memory import Resident
from clips.render.stages.base import Step
from clips.render.stages.checkpoint import DTYPES, Pace, Precision, loading, open_folder, resident
from clips.render.stages.liveportrait.networks import (
    PUBLISHED,
    Appearance,
    Generator,
    Motion,
    NetworkSizes,
    Pose,
    Retargeting,
    Warping,
)
from clips.render.stages.warp import closed_eyes, mouth_opening
from worker.errors import BrokenCheckpoint

SETTING = "liveportrait of TIDEGATE_SLOT__FOLDERS"
FILES = {
    "appearance": "appearance_feature_extractor",
    "motion": "motion_extractor",
    "warping": "warping_module",
    "generator": "spade_generator",
    "retargeting": "stitching_retargeting_module",
}
_WHERE = (
    "",
    "base_models",
    "retargeting_models",
    "liveportrait/base_models",
    "liveportrait/retargeting_models",
)
_ENDINGS = (".safetensors", ".pth")

State = dict[str, torch.Tensor]


class Networks(NamedTuple):
    """LivePortrait's networks, in evaluation mode. Those for keypoints are float32 whatever the
    precision is: they are small, and their errors would show as a shaking head."""

    appearance: Appearance
    motion: Motion
    warping: Warping
    generator: Generator
    retargeting: Retargeting


def make_networks(sizes: NetworkSizes, device: torch.device, dtype: torch.dtype) -> Networks:
    """Make networks with random weights."""
    with device:
        networks = Networks(
            Appearance(sizes), Motion(sizes), Warping(sizes), Generator(sizes), Retargeting(sizes)
        )
    for network in networks:
        network.eval().requires_grad_(False)
    for pictures in (networks.appearance, networks.warping, networks.generator):
        pictures.to(dtype)
    return networks


def load_networks(
    folder: str, sizes: NetworkSizes, device: torch.device, dtype: torch.dtype
) -> Networks:
    """Load the weights in ``folder``. Raises ``LoadError``."""
    path = open_folder(folder, SETTING, "LivePortrait's weights", ())
    files = {stem: _find(path, stem) for stem in FILES.values()}
    missing = [f"{stem}.pth or .safetensors" for stem, file in files.items() if file is None]
    if missing:
        raise BrokenCheckpoint(f"{SETTING}: {path} lacks {', '.join(missing)}")
    networks = make_networks(sizes, device, dtype)
    for network, file in zip(networks, filter(None, files.values()), strict=True):
        with loading(file):
            network.load_state_dict(read_state(file))
    return networks


def _find(path: Path, stem: str) -> Path | None:
    files = (path / where / f"{stem}{ending}" for where in _WHERE for ending in _ENDINGS)
    return next((file for file in files if file.is_file()), None)


def read_state(file: Path) -> State:
    """Read a file's weights as our networks name them: flat, with spectral norms folded."""
    if file.suffix == ".safetensors":
        state = load_file(file)
    else:
        state = torch.load(file, map_location="cpu", weights_only=True)
    return folded(_flat(state))


def _flat(state: Mapping[str, Any]) -> State:
    """Names as our networks have them. For each retargeting network a ``.pth`` has a dictionary, a
    ``.safetensors`` names like ``retarget_eye_module.…``; both come from a wrapper for several
    GPUs."""
    flat: State = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": tensor for inner, tensor in _flat(value).items()}
        else:
            flat[key.removeprefix("module.").replace("_module.", ".", 1)] = value
    return flat


def folded(state: State) -> State:
    """Replace each spectrally normed weight by what it is in evaluation: ``weight_orig`` over its
    largest singular value ``u · (weight_orig v)`` (arXiv 1802.05957)."""
    plain: State = {}
    for key, value in state.items():
        stem, _, ending = key.rpartition("weight_")
        if ending == "orig":
            u, v = state[f"{stem}weight_u"], state[f"{stem}weight_v"]
            plain[f"{stem}weight"] = value / torch.dot(u, value.flatten(1) @ v)
        elif ending not in ("u", "v"):
            plain[key] = value
    return plain


_BATCH = 4
_LIPS_CLOSED, _LIPS_OPEN = 0.0, 0.30
_EYES_OPEN = 0.35
"""Gap of open eyes over their width. The portrait's own gaps are not measured (that takes a
landmark model): it is prompted with its mouth closed and its eyes open, and what a wrong guess
would move is subtracted."""


class LivePortraitVideo:
    """A ``VideoProvider``. The whole portrait moves, as no face is looked for in it: it must show a
    head in the middle that looks at the camera."""

    name = "liveportrait"

    def __init__(
        self, networks: Networks, sizes: NetworkSizes = PUBLISHED, precision: str = ""
    ) -> None:
        self._networks = networks
        self._sizes = sizes
        self._precision = precision

    @classmethod
    def load(
        cls,
        device: torch.device,
        folder: str,
        precision: Precision = "fp16",
        sizes: NetworkSizes = PUBLISHED,
    ) -> "LivePortraitVideo":
        """Load the weights in ``folder``. Raises ``LoadError``."""
        return cls(load_networks(folder, sizes, device, DTYPES[precision]), sizes, precision)

    def residents(self) -> Sequence[Resident]:
        return [
            resident(
                f"liveportrait {name}",
                [network],
                "fp32" if name in ("motion", "retargeting") else self._precision,
            )
            for name, network in self._networks._asdict().items()
        ]

    def close(self) -> None:
        for network in self._networks:
            network.to("meta")

    def render(
        self,
        plan: ClipPlan,
        actor: torch.Tensor,
        audio: torch.Tensor,
        video: torch.Tensor,
        step: Step,
    ) -> None:
        networks, frames = self._networks, video.shape[0]
        step(0.0)
        picture = nn.interpolate(
            actor[None], (self._sizes.picture,) * 2, mode="bilinear", antialias=True
        ).clamp(0, 1)
        pose = networks.motion(picture)
        volume = networks.appearance(picture.to(networks.appearance.second.weight.dtype))
        source = _placed(pose, pose.pitch, pose.yaw, pose.roll)
        opening = mouth_opening(audio, frames, plan.fps)
        pace = Pace(video.device)
        for first in range(0, frames, _BATCH):
            pace()
            step(first / frames)
            end = min(frames, first + _BATCH)
            times = torch.arange(first, end, device=video.device) / plan.fps
            driving = self._driven(pose, source, opening[first:end], times)
            pictures = networks.generator(networks.warping(volume, driving, source)).float()
            if pictures.shape[-1] != video.shape[-1]:
                pictures = nn.interpolate(
                    pictures, video.shape[-2:], mode="bilinear", antialias=True
                )
            video[first:end].copy_(pictures.mul_(255).round_().clamp_(0, 255))
        step(1.0)

    def _driven(
        self, pose: Pose, source: torch.Tensor, opening: torch.Tensor, t: torch.Tensor
    ) -> torch.Tensor:
        """Keypoints ``[n, 21, 3]`` at ``t`` ``[n]`` seconds, lips ``opening`` ``[n]``, 0 to 1."""
        # In degrees: slow sways of unrelated periods, and a nod with the speech.
        pitch = pose.pitch + 1.2 * torch.sin(1.3 * t) + 1.5 * opening
        yaw = pose.yaw + 2.5 * torch.sin(0.7 * t + 1)
        roll = pose.roll + 1.5 * torch.sin(0.9 * t)
        driving = _placed(pose, pitch, yaw, roll)
        small = self._networks.retargeting
        lips = _LIPS_CLOSED + (_LIPS_OPEN - _LIPS_CLOSED) * opening
        eyes = _EYES_OPEN * (1 - closed_eyes(t))
        for network, opened, now in (
            (small.lips, lips, _LIPS_CLOSED),
            (small.eyes, eyes, _EYES_OPEN),
        ):
            still = network(source, torch.full_like(opened[:1], now), now)
            driving = driving + network(source, opened, now) - still
        return small.stitched(source, driving)


def _placed(pose: Pose, pitch: torch.Tensor, yaw: torch.Tensor, roll: torch.Tensor) -> torch.Tensor:
    """Keypoints ``[n, 21, 3]`` of the face at ``n`` angles (the paper's equation 2, without a shift
    towards the camera)."""
    turned = pose.keypoints @ _rotation(pitch, yaw, roll) + pose.expression
    shift = nn.pad(pose.shift[:, :2], (0, 1))
    return turned * pose.scale[..., None] + shift[:, None]


def _rotation(pitch: torch.Tensor, yaw: torch.Tensor, roll: torch.Tensor) -> torch.Tensor:
    """Rotations ``[n, 3, 3]`` of points as rows, by degrees ``[n]``: about x, then y, then z."""
    turns = []
    for angle, (a, b) in ((pitch, (1, 2)), (yaw, (2, 0)), (roll, (0, 1))):
        cos, sin = torch.cos(angle.deg2rad()), torch.sin(angle.deg2rad())
        turn = torch.eye(3, device=angle.device).repeat(len(angle), 1, 1)
        turn[:, a, a], turn[:, b, b] = cos, cos
        turn[:, a, b], turn[:, b, a] = sin, -sin  # transposed: points are rows
        turns.append(turn)
    return turns[0] @ turns[1] @ turns[2]
