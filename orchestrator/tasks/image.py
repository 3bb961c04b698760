"""An image in a chat: the client's file, which only a worker decodes."""

import hashlib
from collections.abc import Sequence
from typing import Self

import msgspec

IMAGE_BYTES = 256
"""Approximate memory in bytes of an image without its file."""


class Image(msgspec.Struct, frozen=True, gc=False):
    """One image. Width and height in pixels come from its header."""

    data: bytes
    width: int
    height: int
    digest: bytes

    @classmethod
    def of(cls, data: bytes, width: int, height: int) -> Self:
        return cls(data, width, height, hashlib.sha256(data).digest())

    def __repr__(self) -> str:
        """Size of the image in pixels and bytes, without its contents, which must not be logged."""
        return f"Image({self.width}x{self.height}, {len(self.data)} bytes)"


Part = str | Image


def text_in(parts: Sequence[Part]) -> str:
    return "".join([part for part in parts if isinstance(part, str)])


def kept_bytes(parts: Sequence[Part]) -> int:
    """Approximate memory in bytes that the images among ``parts`` take."""
    return sum(IMAGE_BYTES + len(part.data) for part in parts if isinstance(part, Image))
