"""The sizes that headers state are those that a decoder finds."""

import io

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.http.images import pixels_of
from tests.support.cases import for_each
from tests.support.pictures import picture

KINDS = ("PNG", "JPEG", "GIF", "WEBP")


@for_each(
    ("kind", "options"),
    [
        ("JPEG", {"progressive": True, "exif": b"Exif\0\0" + bytes(500), "comment": "x" * 3000}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0" + bytes(50)}),
        ("PNG", {"optimize": True}),
        ("GIF", {}),
    ],
)
def test_each_form_of_a_format_is_read(kind: str, options: dict[str, object]) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (123, 45)).save(file, kind, **options)
    assert pixels_of(file.getvalue()) == (123, 45)


def test_other_files_have_no_size() -> None:
    assert pixels_of(b"") is None
    assert pixels_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>") is None
    assert pixels_of(picture(1, kind="BMP")) is None
    assert pixels_of(b"\xff\xd8" + b"\xff" * 100_000) is None
    assert pixels_of(b"RIFF\0\0\0\0WEBPVP8L" + bytes(20)) is None  # without its signature


@given(st.sampled_from(KINDS), st.integers(0, 60), st.binary(max_size=40))
def test_whatever_follows_a_beginning_nothing_is_raised(kind: str, kept: int, rest: bytes) -> None:
    size = pixels_of(_FILES[kind][:kept] + rest)
    assert size is None or min(size) > 0


_FILES = {kind: picture(2, kind=kind) for kind in KINDS}
