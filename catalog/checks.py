"""Checks files against their digests and their formats' own bounds."""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from catalog.errors import DamagedModel, StagingFailed
from catalog.manifests import now_ms
from catalog.models import ModelCatalog, ModelEntry, ModelState
from protocol.gguf import read_gguf

_MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum bytes of a safetensors header, as in the safetensors library."""
_MAX_JSON_BYTES: Final = 256 * 2**20
"""Maximum bytes of a JSON file: the largest tokenizers have 40 MB."""
_ABSURD: Final = (RecursionError, MemoryError, OverflowError)
"""Errors that reading a malicious file can cause."""
_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of one file, in hex. ``git`` is git's object id of the file."""

    sha256: str
    git: str


def digests_of(path: Path) -> Digests:
    """Both digests of a file, in one pass. Raises ``OSError``."""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(2**20):
            sha256.update(piece)
            git.update(piece)
    return Digests(sha256.hexdigest(), git.hexdigest())


def check_formats(folder: Path, files: list[str]) -> None:
    """Check every file whose format determines its length. Raises ``DamagedModel``."""
    tensors: dict[str, set[str]] = {}
    indexes: dict[str, object] = {}
    for name in files:
        if name.endswith(".safetensors"):
            tensors[name] = check_safetensors(folder / name)
        elif name.endswith(".gguf"):
            check_gguf(folder / name)
        elif name.endswith(".json"):
            content = _json(folder / name)
            known = content if isinstance(content, dict) else {}
            if name == "config.json" and not (
                known.get("model_type") or known.get("architectures")
            ):
                raise DamagedModel(
                    "config.json: it names neither a model_type nor architectures, so no engine can"
                    " load it; get it again"
                )
            if name.endswith(".safetensors.index.json"):
                indexes[name] = known.get("weight_map")
    for name, weights in indexes.items():
        if not isinstance(weights, dict):
            raise DamagedModel(f"{Path(name).name}: it has no weight_map")
        for tensor, shard in weights.items():
            if tensor not in tensors.get(str(shard), ()):
                raise DamagedModel(
                    f"{Path(name).name}: it has {tensor} in {shard}, where it is not"
                )


def check_gguf(path: Path) -> dict[str, object]:
    """The metadata of a complete GGUF file. Raises ``DamagedModel``."""
    try:
        return read_gguf(path)
    except ValueError as error:
        raise DamagedModel(f"{path.name}: {error}") from None


def check_safetensors(path: Path) -> set[str]:
    """The names of a file's tensors; their data must fill the file to its last byte.

    Raises ``DamagedModel``.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else math.inf
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise DamagedModel(f"{path.name}: it has no safetensors header, or only a part of it")
        raw = file.read(int(length))
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        spans = sorted((*each["data_offsets"], name) for name, each in header.items())
        at = 0
        for begin, end, name in spans:
            if begin != at or end - begin != _bytes_of(header[name], end - begin):
                raise DamagedModel(f"{path.name}: the tensor {name} is not where it should be")
            at = end
    except (ValueError, KeyError, TypeError, AttributeError, *_ABSURD) as error:
        reason = str(error) or type(error).__name__
        what = f"its safetensors header cannot be read: {reason}"
        raise DamagedModel(f"{path.name}: {what}") from None
    if 8 + length + at != size:
        raise DamagedModel(
            f"{path.name}: it has {size} bytes, and its tensors make {8 + length + at}"
        )
    return set(header)


def _bytes_of(tensor: dict[str, Any], stated: int) -> int:
    bits = _BITS.get(tensor["dtype"])
    if any(type(side) is not int or side < 0 for side in tensor["shape"]):
        raise ValueError(f"a tensor is of shape {tensor['shape']}")
    return stated if bits is None else -(-math.prod(tensor["shape"]) * bits // 8)


def _json(path: Path) -> object:
    if (size := path.stat().st_size) > _MAX_JSON_BYTES:
        raise DamagedModel(
            f"{path.name}: it has {size} bytes, and at most {_MAX_JSON_BYTES} make sense"
        )
    try:
        return json.loads(path.read_bytes())
    except (ValueError, *_ABSURD) as error:
        reason = str(error) or type(error).__name__
        raise DamagedModel(f"{path.name}: it is not JSON: {reason}") from None


def verify_model(
    catalog: ModelCatalog, entry: ModelEntry, threads: int | None = None
) -> ModelEntry:
    """Read every byte again. Returns the new entry: ``BROKEN`` with the reason, or ``ACTIVE``.

    ``threads``: see ``ModelCatalog.digest_of``. Raises ``StagingFailed`` for a model that is not
    complete, ``CatalogUnusable``.
    """
    if entry.state is ModelState.STAGING:
        raise StagingFailed(f"{entry.name} is not complete yet: add it again to resume")
    problem = _problem(catalog.path_of(entry), entry)
    if not problem and catalog.digest_of(entry, threads) != entry.digest:
        problem = "files were added to it that engines read"
    changes: dict[str, str | int] = {
        "state": ModelState.BROKEN if problem else ModelState.ACTIVE,
        "problem": problem,
        "verified_ms": now_ms(),
    }
    catalog.update(entry.id, **changes)
    return msgspec.structs.replace(entry, **changes)


def _problem(folder: Path, entry: ModelEntry) -> str:
    """The first problem found; empty if there is none."""
    for file in entry.files:
        path = folder / file.path
        try:
            if path.stat().st_size != file.bytes:
                return f"{file.path} has {path.stat().st_size} bytes and should have {file.bytes}"
            if digests_of(path).sha256 != file.sha256:
                return f"{file.path} has changed: its SHA-256 is another one"
        except OSError as error:
            return f"{file.path} cannot be read: {error.strerror}"
    try:
        check_formats(folder, [file.path for file in entry.files])
    except DamagedModel as error:
        return str(error)
    return ""
