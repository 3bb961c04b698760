"""Images within a body. Nothing is fetched: a URL could name a host that only this process can
reach (server-side request forgery).

An image of some kilobytes can stand for billions of pixels, so its header is checked before it is
decoded. Of all formats only those are read that OpenAI's and Anthropic's APIs take.
"""

import base64
import binascii
import io
from collections.abc import Sequence
from typing import NamedTuple

import imagesize
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
_HEADER_BYTES = 2**20
"""How much of a file is searched for its size: metadata in front of it, such as color profiles and
previews, may take half a megabyte. A file of empty segments took 0.16 s on an AMD EPYC, on the
thread of large bodies."""


class Pixels(NamedTuple):
    width: int
    height: int


def pixels_of(data: bytes) -> Pixels | None:
    """The size of an image file; None for one that is of another format or broken."""
    is_webp = data.startswith(b"RIFF") and data[8:12] == b"WEBP"
    is_webp &= data[12:16] != b"VP8L" or data[20:21] == b"\x2f"  # the signature of a lossless one
    if not (is_webp or data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF87a", b"GIF89a"))):
        return None
    size = Pixels(*imagesize.get(io.BytesIO(data[:_HEADER_BYTES]), exif_rotation=False))
    return size if min(size) > 0 else None
