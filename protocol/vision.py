"""How a model reads images: the token that represents an image in a prompt, and its count.

Defined once for both sides: the orchestrator counts an image's tokens before it decides on a
request, and the worker computes them.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

MAX_ASPECT: Final = 200
"""Maximum ratio of longest to shortest side of an image that keeps its shape when scaled."""


class ImageTokens(NamedTuple):
    """An image in a prompt: SHA-256 of its bytes, and its number of prompt tokens."""

    digest: bytes
    tokens: int


class Vision(msgspec.Struct, frozen=True):
    """How a model reads images.

    Its chat template writes ``token`` once for each image. In a prompt for a worker, that token,
    ``token_id``, is repeated: ``image_tokens`` times for any image or, if that is 0, once per
    square of ``cell`` by ``cell`` pixels of the scaled image. Images are scaled to sides that are
    multiples of ``cell`` and to ``least_pixels`` to ``most_pixels`` in total. A prompt's image
    files may have ``max_bytes`` in total.
    """

    token: str
    token_id: int
    image_tokens: int = 0
    cell: int = 0
    least_pixels: int = 0
    most_pixels: int = 0
    max_bytes: int = 0

    def tokens_of(self, width: int, height: int) -> int:
        """Number of tokens for an image of ``width`` by ``height`` pixels. Raises ``ValueError``
        for a shape that the model cannot read."""
        if self.image_tokens:
            return self.image_tokens
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"one side is more than {MAX_ASPECT} times as long as the other")
        wide, high = self._scaled(width, height)
        return (wide // self.cell) * (high // self.cell)

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size at which the model sees an image: ``smart_resize`` of Qwen's vision models, in
        transformers and in vLLM, whose results this repeats."""
        cell = self.cell
        wide, high = round(width / cell) * cell, round(height / cell) * cell
        if wide * high > self.most_pixels:
            shrink = math.sqrt(width * height / self.most_pixels)
            wide = max(cell, math.floor(width / shrink / cell) * cell)
            high = max(cell, math.floor(height / shrink / cell) * cell)
        elif wide * high < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (width * height))
            wide = math.ceil(width * grow / cell) * cell
            high = math.ceil(height * grow / cell) * cell
        return wide, high


def keyed_by_images(
    token_ids: Sequence[int], token_id: int, images: Iterable[ImageTokens]
) -> Sequence[int]:
    """A prompt's tokens for the hashes of its KV blocks: an image's tokens, which are all
    ``token_id``, become numbers derived from the image's content. So two prompts share a block only
    if they also share its images."""
    keyed = list(token_ids)
    places = (at for at, one in enumerate(token_ids) if one == token_id)
    for image in images:
        words = array("I", hashlib.shake_256(image.digest).digest(4 * image.tokens))
        for at, word in zip(islice(places, image.tokens), words, strict=False):
            keyed[at] = word
    return keyed
