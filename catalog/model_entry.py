"""What is known of a model on this machine."""

from enum import StrEnum
from pathlib import PurePosixPath

import msgspec


class ModelState(StrEnum):
    """``ACTIVE`` only when every file was there and as it should be."""

    STAGING = "staging"
    """Files are on their way, or were: adding it again goes on."""
    ACTIVE = "active"
    BROKEN = "broken"
    """``verify`` found something wrong, which ``problem`` says."""
    REMOVING = "removing"


class ModelFormat(StrEnum):
    SAFETENSORS = "safetensors"
    """A folder in Hugging Face layout."""
    GGUF = "gguf"
    PICKLE = "pickle"
    """Hugging Face layout, with weights that run code when they are read."""


class ModelFile(msgspec.Struct, frozen=True):
    """One file, ``path`` below the model's folder."""

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
    """Of a hub: the commit."""
    licence: str = ""
    """As its author names it; empty where nothing does."""
    files: tuple[ModelFile, ...] = ()
    digest: str = ""
    """As an engine that serves it has it in its model card."""
    used_ms: int = 0
    verified_ms: int = 0
    problem: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def gguf(self) -> PurePosixPath | None:
        """Of a GGUF model the file that an engine is given: the first, where it is in several."""
        if self.format is not ModelFormat.GGUF:
            return None
        return PurePosixPath(min(f.path for f in self.files if f.path.endswith(".gguf")))
