"""Lists the files of a source of models, and chooses those that a model needs."""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from rich.filesize import decimal as size

from catalog.errors import StagingFailed
from catalog.models import MANIFEST, ModelFormat

_SMALL: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "quantization_config.json",
    "README.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
)
_INDEX: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_MAX_FILES: Final = 10_000
_PICKLES: Final = ("*.bin", "*.pth", "*.pt")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file in a source's listing; digests are in hex, empty if unknown."""

    path: str
    bytes: int
    sha256: str = ""
    git: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of one revision in a source."""

    source: str
    """``hub:org/name``, ``pypi:package``, or a path."""
    name: str
    files: tuple[SourceFile, ...]
    revision: str = ""
    license: str = ""
    urls: Mapping[str, str] = field(default_factory=dict)
    """URL of each file on a hub, by its path."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers with the token, if any: only for the hub, not for servers that it redirects to."""


@dataclass(frozen=True, slots=True)
class FileChoice:
    """The files of a listing that a model needs."""

    format: ModelFormat
    files: tuple[SourceFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def choose(listing: Listing, wanted: str = "") -> FileChoice:
    """Choose the files to fetch: safetensors, or GGUF if there is nothing else or if ``wanted``
    (a pattern for file names) selects it. Raises ``StagingFailed`` with a list of the files."""
    choice = _chosen(listing, wanted)
    if len(choice.files) > _MAX_FILES:
        raise StagingFailed(
            f"the model has {len(choice.files)} files, but at most {_MAX_FILES} are supported"
        )
    for file in choice.files:
        is_plain = file.path.isprintable() and str(PurePosixPath(file.path)) == file.path
        if not is_plain or not isinstance(file.bytes, int) or file.bytes < 0:
            raise StagingFailed(f"the source has a file {file.path!r} of {file.bytes!r} bytes")
    return choice


def _chosen(listing: Listing, wanted: str) -> FileChoice:
    files = {file.path: file for file in listing.files}
    for path in map(PurePosixPath, files):
        if path.is_absolute() or ".." in path.parts or path.name == MANIFEST:
            why = "is Tidegate's own" if path.name == MANIFEST else "would leave its folder"
            raise StagingFailed(f"the source has a file {str(path)!r}, which {why}")
    ggufs = [path for path in files if path.endswith(".gguf")]
    if wanted:
        ggufs = [path for path in ggufs if fnmatch.fnmatchcase(path, wanted)]
        if not ggufs:
            raise StagingFailed(
                f"{listing.source} has no GGUF file {wanted!r}: {_told(listing.files)}"
            )
    weights = () if wanted else _safetensors(files)
    if weights and "config.json" in files:
        small = [path for path in files if _matches(path, _SMALL)]
        needed = sorted({*weights, *small} & files.keys())
        return FileChoice(ModelFormat.SAFETENSORS, tuple(files[path] for path in needed))
    if ggufs:
        return FileChoice(ModelFormat.GGUF, _one_gguf(listing, files, ggufs))
    raise StagingFailed(_why_no_model(listing, files))


def _safetensors(files: dict[str, SourceFile]) -> tuple[str, ...]:
    top = sorted(path for path in files if "/" not in path and path.endswith(".safetensors"))
    if _INDEX in files:
        return (*[path for path in top if path.startswith("model-")], _INDEX)
    if "model.safetensors" in files:
        return ("model.safetensors",)
    # These files hold the same weights in the author's own layout.
    return tuple(path for path in top if not path.startswith(("consolidated", "adapter_")))


def _one_gguf(
    listing: Listing, files: dict[str, SourceFile], ggufs: Sequence[str]
) -> tuple[SourceFile, ...]:
    models = {_SHARD.sub(".gguf", path) for path in ggufs if not _is_projector(path)}
    if len(models) != 1:
        raise StagingFailed(
            f"{listing.source} has {len(models)} GGUF models; choose one with"
            f" --file: {_told(files[path] for path in ggufs)}"
        )
    notes = [path for path in files if path == "README.md" or path.startswith("LICEN")]
    return tuple(files[path] for path in sorted({*ggufs, *notes}) if not _is_projector(path))


def _is_projector(path: str) -> bool:
    """Whether ``path`` is the part of a multi-modal model that reads pictures."""
    return PurePosixPath(path).name.startswith("mmproj")


def _why_no_model(listing: Listing, files: dict[str, SourceFile]) -> str:
    top = files.keys() - {"training_args.bin"}
    pickles = [files[path] for path in top if "/" not in path and _matches(path, _PICKLES)]
    if pickles and "config.json" in files:
        return (
            f"{listing.source} has its weights only in {_told(pickles)}, which are pickles: they"
            " can run any code when they are read; use a version with safetensors"
        )
    return (
        f"{listing.source} is not a model that an engine here loads: expected config.json with"
        f" .safetensors files, or a .gguf file; there is {_told(listing.files)}"
    )


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _told(files: Iterable[SourceFile]) -> str:
    told = sorted(files, key=lambda file: file.path)
    text = ", ".join(f"{file.path} ({size(file.bytes)})" for file in told[:8])
    return (text + (f" and {len(told) - 8} more" if len(told) > 8 else "")) or "nothing"
