"""The catalog's entry of a model on this machine."""

from enum import StrEnum
from pathlib import PurePosixPath

import msgspec


class ModelState(StrEnum):
    """State of a model: ``ACTIVE`` only if every file was there and as it should be."""

    STAGING = "staging"
    """Files are being downloaded, or that was interrupted: adding the model again resumes it."""
    ACTIVE = "active"
    BROKEN = "broken"
    """``verify`` found something wrong, which ``problem`` says."""


class ModelFormat(StrEnum):
    SAFETENSORS = "safetensors"
    """A folder in Hugging Face layout."""
    GGUF = "gguf"
    PICKLE = "pickle"
    """Hugging Face layout, with weights that run code when they are read."""


class ModelFile(msgspec.Struct, frozen=True):
    """One file; ``path`` is below the model's folder."""

    path: str
    bytes: int
    sha256: str


class ModelEntry(msgspec.Struct, frozen=True):
    """One model. Times are Unix milliseconds."""

    id: str
    name: str
    state: ModelState
    format: ModelFormat
    source: str
    """``hub:org/name``, or the path that it was made from."""
    created_ms: int
    revision: str = ""
    """The commit, for a model from a hub."""
    licence: str = ""
    """The licence as its author names it; empty if no file names one."""
    files: tuple[ModelFile, ...] = ()
    digest: str = ""
    """The model's digest, as an engine that serves it tells it in its model card."""
    used_ms: int = 0
    verified_ms: int = 0
    problem: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def gguf(self) -> PurePosixPath | None:
        """The file of a GGUF model that an engine is given: the first if there are several. None
        for other formats."""
        if self.format is not ModelFormat.GGUF:
            return None
        return PurePosixPath(min(f.path for f in self.files if f.path.endswith(".gguf")))
