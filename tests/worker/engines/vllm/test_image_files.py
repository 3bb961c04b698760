"""Which image files are decoded, and by which rule a model counts them, without vLLM."""

import sys
from types import SimpleNamespace

import pytest

from protocol import Vision
from tests.support.cases import for_each
from tests.support.pictures import bomb, picture
from worker.engines.vllm.images import (
    MAX_PIXELS,
    Blind,
    blank_images,
    check_count,
    counting_rule,
    decoded,
    places_of,
)
from worker.errors import InvalidCall

pytest.importorskip("PIL")
SEEING = Vision("<|image|>", 9, image_tokens=16, max_bytes=2**20)


@for_each(
    ("file", "why"),
    [
        (b"no image at all", "image 1 cannot be decoded"),
        (picture(1)[:200], "image 1 cannot be decoded"),
        (bomb(9000), f"image 1 has more than {MAX_PIXELS} pixels"),
    ],
)
def test_what_cannot_be_decoded_is_named(file: bytes, why: str) -> None:
    with pytest.raises(InvalidCall, match=why):
        decoded(SEEING, file, 1)
    image, tokens = decoded(SEEING, picture(1), 1)
    assert (image.mode, tokens) == ("RGB", 16)


def test_one_kind_of_model_has_a_number_for_all_images_the_other_one_by_their_sizes() -> None:
    assert [image.size for image in blank_images()] == [(32, 32), (448, 224)]
    fixed = counting_rule("<|image|>", 9, None, [16, 16], 2**20)
    assert fixed == SEEING
    size = {"shortest_edge": 256, "longest_edge": 2560}
    processor = SimpleNamespace(patch_size=4, merge_size=2, size=size)
    by_size = Vision("<|image|>", 9, cell=8, least_pixels=256, most_pixels=2560, max_bytes=2**20)
    counts = [by_size.tokens_of(*image.size) for image in blank_images()]
    assert counting_rule("<|image|>", 9, processor, counts, 2**20) == by_size
    for odd in (processor, None):
        with pytest.raises(Blind, match="by a rule that is not known"):
            counting_rule("<|image|>", 9, odd, [7, 9], 2**20)


def test_a_prompt_made_for_another_model_is_refused() -> None:
    assert places_of(SEEING, [3, 9, 9, 4]) == [1, 2]
    with pytest.raises(InvalidCall, match="no tokens for them"):
        places_of(SEEING, [3, 4])
    check_count(16, 16)
    with pytest.raises(InvalidCall, match="made for another model"):
        check_count(16, 12)


def test_without_pillow_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Blind, match="tidegate engines ensure vllm"):
        blank_images()
