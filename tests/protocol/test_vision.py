"""How many tokens an image has, and how blocks of prompts with images are named."""

import random

import pytest

from protocol import ImageTokens, Vision, block_hashes, keyed_by_images
from tests.support.lazy import transformers

QWEN = Vision("<|image_pad|>", 9, cell=28, least_pixels=56 * 56, most_pixels=28 * 28 * 1280)


@pytest.mark.slow
def test_tokens_by_size_are_those_of_the_library() -> None:
    library = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
    rng = random.Random(1)
    for _ in range(2000):
        width = int(2 ** rng.uniform(0, 13))
        height = max(1, min(8192, int(width * 2 ** rng.uniform(-7.5, 7.5))))
        try:
            high, wide = library.smart_resize(
                height, width, 28, min_pixels=QWEN.least_pixels, max_pixels=QWEN.most_pixels
            )
        except ValueError:
            with pytest.raises(ValueError, match="200 times"):
                QWEN.tokens_of(width, height)
            continue
        assert QWEN.tokens_of(width, height) == (high // 28) * (wide // 28)
        # Turned by its metadata, an image has as many.
        assert QWEN.tokens_of(height, width) == QWEN.tokens_of(width, height)


def test_blocks_are_shared_by_prompts_with_the_same_images_only() -> None:
    ids = [1, 2, 3, 4, 9, 9, 9, 9, 5, 6, 9, 9, 7, 8, 7, 8]

    def named(*images: bytes) -> list[bytes]:
        counts = (4, 2)
        sizes = [ImageTokens(name, count) for name, count in zip(images, counts, strict=True)]
        return block_hashes(keyed_by_images(ids, 9, sizes), 4, b"")

    both = named(b"cat", b"dog")
    assert named(b"cat", b"dog") == both
    assert named(b"cat", b"fox")[:2] == both[:2] and named(b"cat", b"fox")[2] != both[2]
    assert named(b"fox", b"dog")[0] == both[0] and named(b"fox", b"dog")[1] != both[1]
    assert block_hashes(ids, 4, b"")[1] != both[1]
