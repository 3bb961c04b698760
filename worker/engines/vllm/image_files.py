"""Decodes image files, and finds out by which rule a model counts their tokens."""

import io
from collections.abc import Sequence
from typing import Any, Final

from protocol import Vision
from worker.errors import InvalidCall
from worker.text import Tokenizer

IMAGE_BYTES: Final = 32 * 2**20
"""Most bytes of a prompt's images together, as files."""
MAX_PIXELS: Final = 2**26
"""Most pixels of an image that is decoded: 200 MB as red, green and blue."""
_FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP")
_SIZES: Final = ((32, 32), (448, 224))
"""Width and height of two blank images that are read as a trial: one of them is scaled up by models
whose number of tokens depends on the size."""


class Blind(Exception):
    """Images cannot be read; the message says why, for the log."""


def why_blind(error: Exception) -> str:
    """The reason to log for any error of a trial with images."""
    said = str(error).strip().split("\n")[0]
    return said if isinstance(error, Blind) else f"{type(error).__name__}: {said}"


def blank_images() -> list[Any]:
    """Images for ``counting_rule``. Raises ``Blind`` without Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise Blind(f"Pillow cannot be imported ({error}): tidegate engines ensure vllm") from error
    return [Image.new("RGB", size) for size in _SIZES]


def blank_file() -> tuple[bytes, tuple[int, int]]:
    """A blank image as a file, with its width and height."""
    (image, *_), file = blank_images(), io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), image.size


def image_token(tokenizer: Tokenizer, token_id: int) -> str:
    """The token of an image as chat templates write it. Raises ``Blind`` if this one does not."""
    token = tokenizer.spelling_of(token_id)
    if not token or token not in tokenizer.chat_template:
        raise Blind(f"its chat template does not write the token of an image ({token or token_id})")
    return token


def counting_rule(
    token: str, token_id: int, processor: Any, counts: Sequence[int], max_bytes: int
) -> Vision:
    """The rule by which ``blank_images`` have these numbers of tokens. ``processor`` is the
    checkpoint's own image processor. Raises ``Blind`` where no rule is known."""
    if len(set(counts)) == 1 and counts[0] > 0:
        return Vision(token, token_id, image_tokens=counts[0], max_bytes=max_bytes)
    try:
        vision = Vision(
            token,
            token_id,
            cell=int(processor.patch_size) * int(processor.merge_size),
            least_pixels=int(processor.size["shortest_edge"]),
            most_pixels=int(processor.size["longest_edge"]),
            max_bytes=max_bytes,
        )
        if [vision.tokens_of(*size) for size in _SIZES] == list(counts):
            return vision
    except (AttributeError, KeyError, TypeError):
        pass
    raise Blind("how many tokens an image has follows from its size by a rule that is not known")


def places_of(vision: Vision, token_ids: Sequence[int]) -> list[int]:
    """Where a prompt that comes with images has tokens of them. Raises ``InvalidCall`` if it has
    none."""
    places = [at for at, one in enumerate(token_ids) if one == vision.token_id]
    if not places:
        raise InvalidCall("the prompt has images, and no tokens for them")
    return places


def decoded(vision: Vision, file: bytes, number: int) -> tuple[Any, int]:
    """A file as an RGB image, turned as its metadata says, and the number of its tokens. Raises
    ``InvalidCall`` for what is not an image that the model reads; ``number`` names it there."""
    from PIL import Image, ImageOps

    try:
        # Reads no more than the header, so that a bomb is seen before it is decoded.
        image: Any = Image.open(io.BytesIO(file), formats=_FORMATS)
        is_small = image.width * image.height <= MAX_PIXELS
        if is_small:
            image = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        what = f"cannot be decoded ({type(error).__name__})"
        raise InvalidCall(f"image {number} {what}") from None
    if not is_small:
        raise InvalidCall(f"image {number} has more than {MAX_PIXELS} pixels")
    try:
        return image, vision.tokens_of(*image.size)
    except ValueError as error:
        raise InvalidCall(f"image {number} cannot be read: {error}") from None


def check_count(tokens: int, places: int) -> None:
    """Raise ``InvalidCall`` unless a prompt has as many places as its images have tokens."""
    if tokens != places:
        raise InvalidCall(
            f"the prompt has {places} tokens for images of which the model makes {tokens}: it"
            " was made for another model or with other settings of it"
        )
