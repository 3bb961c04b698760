"""Images for tests, and a chat template that shows them."""

import io
import struct
import zlib

import numpy as np

IMAGE_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}<|see|><|image|><|seen|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def picture(seed: int, width: int = 40, height: int = 24, kind: str = "PNG") -> bytes:
    """An image file of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of some hundred bytes that says it is ``side`` pixels wide and high."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        total = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", total)

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")
