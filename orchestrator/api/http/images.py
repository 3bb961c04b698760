"""Reads images in a body. Never fetches a URL: it could name a host that only this process can
reach (server-side request forgery).

An image of some kilobytes can have billions of pixels, so its header is checked before it is
decoded. Only the formats of OpenAI's and Anthropic's APIs are supported.
"""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import imagesize
import msgspec

from orchestrator.api.http.field_errors import missing, wrong
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.image import Image, Part
from orchestrator.tasks.job import Message, said_by
from protocol import excerpt

_EXAMPLE = "data:image/png;base64,iVBORw…"


def image_of_url(url: str | None, where: str) -> Image:
    """The image in a ``data:`` URL at ``where``. Raises ``InvalidRequest`` for any other URL."""
    if not url:
        raise missing(where, f"send the image as a data: URL, such as {_EXAMPLE}")
    scheme = url[:16].partition(":")[0].lower()
    if scheme != "data":
        raise wrong(
            where,
            f"images are not fetched from URLs ({excerpt(scheme, 16)}: …); send the image itself "
            f"as a data: URL, such as {_EXAMPLE}",
        )
    head, _, data = url.partition(",")
    if not head.lower().endswith(";base64"):
        raise wrong(where, f"the image in a data: URL must be base64, such as {_EXAMPLE}")
    return image_of_base64(data, where)


def image_of_base64(data: str | None, where: str) -> Image:
    """The image with the base64 file ``data``. The file determines its format, not the body.
    Raises ``InvalidRequest``."""
    if not data:
        raise missing(where, "send the image file as base64")
    try:
        file = base64.b64decode(data, validate=True)
    except ValueError:
        raise wrong(where, "the image is not valid base64") from None
    size = pixels_of(file)
    if size is None:
        raise wrong(where, f"expected a {FORMATS} image; this has another format or is broken")
    return Image.of(file, size.width, size.height)


def shown_by_users(turns: Sequence[Message]) -> tuple[Message, ...]:
    """The turns, with the images of tool results moved to a user's turn after the results. Chat
    templates show only users' images."""
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
    """The error for an image that is given as a file id."""
    why = "images are not read from uploaded files; send the image itself as base64"
    return wrong(where, why)


FORMATS = "PNG, JPEG, GIF or WebP"
_HEADER_BYTES = 2**20
"""Bytes of a file that are searched for its size. Metadata before the size, such as color profiles
and previews, may take half a megabyte. A file of empty segments took 0.16 s on an AMD EPYC, on the
thread for large bodies."""


class Pixels(NamedTuple):
    width: int
    height: int


def pixels_of(data: bytes) -> Pixels | None:
    """The size of an image file; None if it has another format or is broken."""
    is_webp = data.startswith(b"RIFF") and data[8:12] == b"WEBP"
    is_webp &= data[12:16] != b"VP8L" or data[20:21] == b"\x2f"  # signature of lossless WebP
    if not (is_webp or data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF87a", b"GIF89a"))):
        return None
    size = Pixels(*imagesize.get(io.BytesIO(data[:_HEADER_BYTES]), exif_rotation=False))
    return size if min(size) > 0 else None
