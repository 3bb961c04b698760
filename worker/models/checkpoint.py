"""A checkpoint's safetensors files, opened and checked before the first weight is read."""

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from worker.encoding import openable
from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.models.folder import why_unservable
from worker.models.parameters import Parameter, StoredPart

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_COMPARED_ROWS: Final = 4096
"""Rows compared at a time: tensors that differ usually differ in the first rows."""
# Buffers that old checkpoints contain and models compute themselves.
_IGNORED: Final = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Offset, dtype and shape of a tensor in its file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """The weight files of a directory, open until the ``with`` block ends."""

    def __init__(self, path: Path) -> None:
        """Open the files. Raises ``BrokenCheckpoint`` if one is missing, corrupt or cut short."""
        files = _weight_files(path)
        if not any(file.exists() for file in files) and (problem := why_unservable(path)):
            raise BrokenCheckpoint(problem)
        self.path = path
        self._stack = ExitStack()
        self._mapped: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}
        self._tensors: dict[str, StoredTensor] = {}
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            for file in files:
                self._open(file)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, part: StoredPart) -> StoredTensor:
        return self._tensors[part.name]

    @property
    def names(self) -> Set[str]:
        """Names of all tensors in the files."""
        return self._tensors.keys()

    def mapped(self, part: StoredPart) -> torch.Tensor:
        """A tensor as a view of its file; it outlives the ``with`` block."""
        tensor: torch.Tensor = self._mapped[self[part].file].get_tensor(part.name)
        return tensor

    def read_into(self, part: StoredPart, out: torch.Tensor) -> None:
        """Read a whole tensor into ``out``, a contiguous CPU tensor of the same dtype and shape."""
        stored = self[part]
        self.read_bytes(stored.file, stored.offset, out.view(-1).view(torch.uint8))

    def read_bytes(self, file: Path, offset: int, out: torch.Tensor) -> None:
        """Fill ``out``, uint8 [bytes] on the CPU, from ``file`` starting at ``offset``."""
        view = out.numpy().data
        descriptor = self._descriptors[file]
        while view:
            try:
                count = os.preadv(descriptor, [view[: 2**30]], offset)
            except OSError as error:
                raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error
            if count == 0:
                raise BrokenCheckpoint(f"{file} became shorter while it was read")
            view, offset = view[count:], offset + count

    def check_fit(self, parameters: Iterable[Parameter], unused: Iterable[str]) -> None:
        """Check that all parts exist with their shapes and supported dtypes, and nothing else.

        Raises ``BrokenCheckpoint`` or ``UnsupportedModel``.
        """
        parts = [part for each in parameters for part in (*each.parts, *each.bias)]
        known = {part.name for part in parts} | set(unused)
        missing = [part.name for part in parts if part.name not in self._tensors]
        extra = [n for n in self._tensors if n not in known and not _IGNORED.search(n)]
        wrong = [
            f"{part.name} is {list(self[part].shape)}, expected {list(part.shape)}"
            for part in parts
            if part.name in self._tensors and self[part].shape != part.shape
        ]
        problems = [
            f"{title} {len(found)} tensors ({', '.join(found[:3])}"
            f"{', …' if len(found) > 3 else ''})"
            for title, found in (
                ("lack", missing),
                ("have unknown", extra),
                ("have misshapen", wrong),
            )
            if found
        ]
        if problems:
            raise BrokenCheckpoint(
                f"{self.path}: config.json and the weights do not match: the weights"
                f" {'; '.join(problems)}"
            )

    def _open(self, file: Path) -> None:
        try:
            # The library checks the header and the length of the file.
            self._mapped[file] = self._stack.enter_context(
                safe_open(file, framework="pt", device="cpu")
            )
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, descriptor)
            (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
            header = json.loads(os.pread(descriptor, length, 8))
        except FileNotFoundError as error:
            raise BrokenCheckpoint(
                f"{file} is missing; the download of this checkpoint is not complete"
            ) from error
        except (SafetensorError, OSError) as error:
            raise BrokenCheckpoint(
                f"{file} is corrupt or cut short ({error}); download it again"
            ) from error
        self._descriptors[file] = descriptor
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in self._tensors:
                raise BrokenCheckpoint(f"{self.path}: {name} is in more than one file")
            self._tensors[name] = _stored(file, name, entry, 8 + length)


def differ(path: Path, one: str, other: str) -> bool:
    """Whether a checkpoint directory contains both tensors and they differ.

    Raises ``BrokenCheckpoint``.
    """
    with Checkpoint(path) as checkpoint:
        if not {one, other} <= checkpoint.names:
            return False
        parts = [StoredPart(name, ()) for name in (one, other)]
        if len({(checkpoint[part].dtype, checkpoint[part].shape) for part in parts}) > 1:
            return True
        tensors = [checkpoint.mapped(part) for part in parts]
        return not all(
            torch.equal(*(tensor[start : start + _COMPARED_ROWS] for tensor in tensors))
            for start in range(0, len(tensors[0]), _COMPARED_ROWS)
        )


def prefetch(path: Path) -> None:
    """Tell the kernel to start reading the weight files, and return at once."""
    for file in _weight_files(path):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # opening it reports the error
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def _stored(file: Path, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None and not _IGNORED.search(name):
        raise UnsupportedModel(
            f"{file}: {name} is of type {entry['dtype']}; this worker reads"
            f" {', '.join(_DTYPES)}; convert the checkpoint"
        )
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return StoredTensor(file, dtype or torch.float32, shape, data_start + begin, end - begin)


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.exists():
        return [path / _SINGLE]
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise BrokenCheckpoint(f"{index} is not a safetensors index: {error!r}") from error
    return [openable(path / shard) for shard in sorted(shards)]
