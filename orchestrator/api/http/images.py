"""Images within a body. Nothing is fetched: a URL could name a host that only this process can
reach (server-side request forgery).

An image of some kilobytes can stand for billions of pixels, so its header is checked before it is
decoded. Of all formats only those are read that OpenAI's and Anthropic's APIs take.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from orchestrator.errors import InvalidRequest
from orchestrator.tasks.image import Image, Part
from orchestrator.tasks.job import Message, said_by
from protocol import excerpt

_EXAMPLE = "data:image/png;base64,iVBORw…"


def image_of_url(url: str | None, where: str) -> Image:
    """The image in a ``data:`` URL at ``where``. Raises ``InvalidRequest`` for any other URL."""
    if not url:
        raise InvalidRequest(
            f"{where} is required: the image as a data: URL, for instance {_EXAMPLE}", field=where
        )
    scheme = url[:16].partition(":")[0].lower()
    if scheme != "data":
        raise InvalidRequest(
            f"{where}: images are not fetched from elsewhere ({excerpt(scheme, 16)}: …); send the "
            f"image itself as a data: URL, for instance {_EXAMPLE}",
            field=where,
        )
    head, _, data = url.partition(",")
    if not head.lower().endswith(";base64"):
        raise InvalidRequest(
            f"{where}: a data: URL must have its image as base64, for instance {_EXAMPLE}",
            field=where,
        )
    return image_of_base64(data, where)


def image_of_base64(data: str | None, where: str) -> Image:
    """The image whose file is ``data``, as base64. Its format is read from the file, not from the
    body. Raises ``InvalidRequest``."""
    if not data:
        raise InvalidRequest(f"{where} is required: the image's file as base64", field=where)
    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{where}: the image is not valid base64", field=where) from None
    size = pixels_of(file)
    if size is None:
        raise InvalidRequest(
            f"{where}: expected an image that is a {FORMATS} file; this is another format, or "
            "broken",
            field=where,
        )
    return Image.of(file, size.width, size.height)


def shown_by_users(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Turns with the images of tools' results moved to a user's turn behind these: chat templates
    show images of users only."""
    shown: list[Message] = []
    images: list[Part] = []
    for turn in turns:
        if turn.role == "tool" and turn.parts:
            images += turn.images
            turn = msgspec.structs.replace(turn, parts=())
        elif images and turn.role == "user":
            said = said_by("user", [*images, *(turn.parts or (turn.content,))])
            turn, images = msgspec.structs.replace(said, is_open=turn.is_open), []
        elif images and turn.role != "tool":
            shown.append(said_by("user", images))
            images = []
        shown.append(turn)
    return (*shown, said_by("user", images)) if images else tuple(shown)


def refuse_file(where: str) -> InvalidRequest:
    """The error for an image that is named by a file's id."""
    return InvalidRequest(
        f"{where}: images are not read from uploaded files; send the image itself, as base64",
        field=where,
    )


FORMATS = "PNG, JPEG, GIF or WebP"
_MAX_SEGMENTS = 4096
"""Segments of a JPEG that are looked through for its size; usual ones have some ten before it."""
_STARTS_OF_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_FILL = 0xFF


class Pixels(NamedTuple):
    width: int
    height: int


def pixels_of(data: bytes) -> Pixels | None:
    """The size of an image file; None for one that is of another format or broken."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        found = _png(data)
    elif data.startswith(b"\xff\xd8"):
        found = _jpeg(data)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        found = Pixels(_little(data, 6, 2), _little(data, 8, 2))
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        found = _webp(data)
    else:
        return None
    return found if found is not None and min(found) > 0 else None


def _png(data: bytes) -> Pixels | None:
    if data[12:16] != b"IHDR":
        return None
    return Pixels(_big(data, 16, 4), _big(data, 20, 4))


def _jpeg(data: bytes) -> Pixels | None:
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at : at + 1] != b"\xff" or at + 1 >= len(data):
            return None
        kind = data[at + 1]
        if kind in _STARTS_OF_FRAMES:
            return Pixels(_big(data, at + 7, 2), _big(data, at + 5, 2))
        if kind == _FILL:
            at += 1
        elif kind in _WITHOUT_LENGTH:
            at += 2
        else:
            at += 2 + _big(data, at + 2, 2)
    return None


def _webp(data: bytes) -> Pixels | None:
    match data[12:16]:
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            return Pixels(_little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF)
        case b"VP8L" if data[20:21] == b"\x2f":
            bits = _little(data, 21, 4)
            return Pixels(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        case b"VP8X":
            return Pixels(1 + _little(data, 24, 3), 1 + _little(data, 27, 3))
    return None


def _big(data: bytes, at: int, length: int) -> int:
    return int.from_bytes(data[at : at + length], "big")


def _little(data: bytes, at: int, length: int) -> int:
    return int.from_bytes(data[at : at + length], "little")
