"""Loads LivePortrait's published weights from a downloaded folder: ``.pth`` in the layout of
huggingface.co/KwaiVGI/LivePortrait, or ``.safetensors`` side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from clips.render.stages.checkpoint import loading, open_folder
from clips.render.stages.liveportrait.networks import (
    Appearance,
    Generator,
    Motion,
    Retargeting,
    Sizes,
    Warping,
)
from worker.errors import BrokenCheckpoint

SETTING = "TIDEGATE_SLOT__LIVEPORTRAIT__FOLDER"
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


@dataclass(frozen=True, slots=True)
class Networks:
    """LivePortrait's networks, in evaluation mode. Those for keypoints are float32 whatever the
    precision is: they are small, and their errors would show as a shaking head."""

    appearance: Appearance
    motion: Motion
    warping: Warping
    generator: Generator
    retargeting: Retargeting

    def named(self) -> dict[str, torch.nn.Module]:
        return {name: getattr(self, name) for name in FILES}


def make_networks(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Networks:
    """Make networks with random weights."""
    with device:
        networks = Networks(
            Appearance(sizes),
            Motion(sizes),
            Warping(sizes),
            Generator(sizes),
            Retargeting(sizes),
        )
    for network in networks.named().values():
        network.eval().requires_grad_(False)
    for pictures in (networks.appearance, networks.warping, networks.generator):
        pictures.to(dtype)
    return networks


def load_networks(folder: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Networks:
    """Load the weights in ``folder``. Raises ``LoadError``."""
    path = open_folder(folder, SETTING, "LivePortrait's weights", ())
    files = {name: _find(path, stem) for name, stem in FILES.items()}
    missing = [f"{FILES[name]}.pth or .safetensors" for name, file in files.items() if file is None]
    if missing:
        raise BrokenCheckpoint(f"{SETTING}: {path} lacks {', '.join(missing)}")
    networks = make_networks(sizes, device, dtype)
    for name, network in networks.named().items():
        file = files[name]
        assert file is not None
        with loading(file):
            network.load_state_dict(read_state(file))
    return networks


def _find(path: Path, stem: str) -> Path | None:
    files = (path / where / f"{stem}{ending}" for where in _WHERE for ending in _ENDINGS)
    return next((file for file in files if file.is_file()), None)


def read_state(file: Path) -> State:
    """Read a file's weights as our networks name them: flat, with spectral norms folded."""
    if file.suffix == ".safetensors":
        return folded(_flat(load_file(file)))
    return folded(_flat(torch.load(file, map_location="cpu", weights_only=True)))


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
