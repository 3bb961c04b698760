"""Images for tests, and a chat template that shows them."""

import io

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
