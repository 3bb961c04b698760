"""Weights from safetensors files to the parameters of a model, fused on the way.

A model lists its parameters as ``Parameter`` specs; nothing of it depends on how a checkpoint
names or splits them. All shapes are checked before the first byte of data is read.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.models.errors import BrokenCheckpoint

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Buffers that old checkpoints carry and models compute themselves.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint and the shape that the configuration gives it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: parts of the checkpoint, stacked along dimension 0."""

    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def load_parameters(
    path: Path,
    parameters: Mapping[str, Parameter],
    dtype: torch.dtype,
    device: torch.device,
    unused: Iterable[str] = (),
) -> dict[str, torch.Tensor]:
    """Read the ``parameters`` of the checkpoint directory ``path`` onto ``device`` as ``dtype``.

    A single-part parameter whose type fits stays a view of the mapped file on the CPU. Tensors
    named in ``unused`` may be in the files and are left there. Raises ``BrokenCheckpoint``.
    """
    with ExitStack() as stack, torch.inference_mode():
        tensors = _open(path, stack)
        _check_fit(path, tensors, parameters, set(unused))
        loaded = {}
        for name, parameter in parameters.items():
            parts = [_read(tensors[part.name], part.name) for part in parameter.parts]
            if len(parts) == 1:
                loaded[name] = parts[0].to(device, dtype)
                continue
            fused = torch.empty(parameter.shape, dtype=dtype, device=device)
            row = 0
            for part in parts:
                fused[row : row + len(part)].copy_(part)
                row += len(part)
            loaded[name] = fused
        return loaded


def _open(path: Path, stack: ExitStack) -> dict[str, Any]:
    """All tensors of the checkpoint by name: the open file that holds each."""
    tensors: dict[str, Any] = {}
    for file in _weight_files(path):
        try:
            opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            tensors.update(dict.fromkeys(opened.keys(), opened))
        except FileNotFoundError as error:
            raise BrokenCheckpoint(
                f"{file} is missing; the download of this checkpoint is not complete"
            ) from error
        except (SafetensorError, OSError) as error:
            raise BrokenCheckpoint(
                f"{file} is corrupt or cut short ({error}); download it again"
            ) from error
    return tensors


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.exists():
        return [path / _SINGLE]
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise BrokenCheckpoint(f"{index} is not a safetensors index: {error!r}") from error
    return [path / shard for shard in sorted(shards)]


def _check_fit(
    path: Path,
    tensors: Mapping[str, Any],
    parameters: Mapping[str, Parameter],
    unused: set[str],
) -> None:
    """Every part is there in its shape, and nothing else is."""
    parts = [part for parameter in parameters.values() for part in parameter.parts]
    missing = [part.name for part in parts if part.name not in tensors]
    known = {part.name for part in parts} | unused
    extra = [name for name in tensors if name not in known and not _IGNORED.search(name)]
    wrong = []
    for part in parts:
        if part.name in tensors:
            shape = tuple(tensors[part.name].get_slice(part.name).get_shape())
            if shape != part.shape:
                wrong.append(f"{part.name} is {list(shape)}, expected {list(part.shape)}")
    problems = [
        f"{title} {len(found)} tensors ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"
        for title, found in (
            ("lack", missing),
            ("have unknown", extra),
            ("have misshapen", wrong),
        )
        if found
    ]
    if problems:
        raise BrokenCheckpoint(
            f"{path}: config.json and the weights do not fit: the weights {'; '.join(problems)}"
        )


def _read(file: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    return tensor
