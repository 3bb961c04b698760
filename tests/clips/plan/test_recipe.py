"""Recipes: what is taken, and how what is wrong is named."""

from typing import Any

import msgspec
import pytest

from clips.plan.recipe import RecipeError, read_recipe
from tests.support.cases import for_each

WHOLE = {
    "schema": "1.0",
    "text": "Good morning.",
    "voice": {"name": "en-us", "rate": 1.2, "pitch": 0.9},
    "portrait": {"prompt": "red hair", "seed": 7},
    "video": {"fps": 12, "size": 128, "seconds": 4},
    "check": {"enabled": False},
}


def test_a_whole_recipe_and_the_least_are_read() -> None:
    recipe = read_recipe(msgspec.json.encode(WHOLE))
    assert (recipe.voice.rate, recipe.video.size, recipe.check.enabled) == (1.2, 128, False)
    assert read_recipe({"schema": "1.0", "text": "Hi"}).video.fps == 24


@for_each(
    ("change", "field", "words"),
    [
        ({"schema": None}, "schema", "is missing"),
        ({"schema": "2.0"}, "schema", "2.0 is not served here; 1.x is"),
        ({"schema": 1}, "schema", "must be a version"),
        ({"text": ""}, "text", "length >= 1"),
        ({"text": "  "}, "text", "nothing to say"),
        ({"text": "\x00\u200b\n"}, "text", "nothing to say"),
        ({"voice": {"rate": 9}}, "voice.rate", "<= 2.0"),
        ({"video": {"fps": 24.5}}, "video.fps", "expected `int`"),
        ({"video": {"size": 100}}, "video.size", "multiple of 32"),
        ({"video": {"seconds": 1e-9}}, "video.seconds", ">= 0.5"),
        ({"video": {"fsp": 24}}, "video.fsp", "unknown field"),
        ({"colour": "blue"}, "colour", "unknown field"),
        ({"schema": "1.1", "providers": {"video": "warp"}}, "providers", "unknown field"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe({**WHOLE, **change})
    assert caught.value.field == field
    assert words in str(caught.value)


@for_each("data", [b"{", b"[]", "7", b"\xff", b"[" * 60_000, b" " * 100_000])
def test_what_is_no_object_is_said_to_be_none(data: bytes | str) -> None:
    with pytest.raises(RecipeError, match="recipe: "):
        read_recipe(data)


def test_a_later_minor_version_may_say_more() -> None:
    later = {**WHOLE, "schema": "1.7", "music": "jazz", "video": {"fps": 12, "grain": 0.1}}
    assert read_recipe(later).video.fps == 12
