"""Images that a body has in itself. Nothing is fetched: a URL in a request could name any host that
this process can reach, and no other client (server-side request forgery).
"""

import base64
import binascii

from orchestrator.api.http.image_headers import FORMATS, pixels_of
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.image import Image
from protocol import excerpt

_EXAMPLE = "data:image/png;base64,iVBORw…"


def image_of_url(url: str | None, where: str) -> Image:
    """The image in a ``data:`` URL, which a body has at ``where``. Raises ``InvalidRequest``, for
    all other URLs too."""
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
    """The image whose file is ``data``, as base64. Its format is seen from the file, whatever the
    body calls it. Raises ``InvalidRequest``."""
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


def refuse_file(where: str) -> InvalidRequest:
    """The error for an image that is named by a file's id."""
    return InvalidRequest(
        f"{where}: images are not read from uploaded files; send the image itself, as base64",
        field=where,
    )
