"""Finds words that a voice could only spell out: those in letters foreign to its language.

eSpeak NG speaks some scripts by any voice, in the language that has them. For letters of the others
it says "Japanese letter" and the like, 0.8 s each. Tried with version 1.52, voice by voice.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Final

from clips.plan.recipe import RecipeError
from protocol import excerpt

_SAID_BY_ALL: Final = frozenset(
    (
        *("LATIN", "ARMENIAN", "BENGALI", "DEVANAGARI", "GEORGIAN", "GUJARATI", "GURMUKHI"),
        *("HANGUL", "KANNADA", "MALAYALAM", "SINHALA", "TAMIL"),
    )
)
_LANGUAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "ARABIC": ("ar", "fa", "sd", "ug", "ur"),
    "CHEROKEE": ("chr",),
    "CJK": ("cmn", "yue"),
    "CYRILLIC": (
        *(
            "ru",
            "uk",
            "bg",
            "ba",
            "be",
            "bs",
            "cv",
            "hr",
            "kk",
            "ky",
            "mk",
            "nog",
            "sr",
            "tt",
            "uz",
        ),
    ),
    "ETHIOPIC": ("am", "ti"),
    "GREEK": ("el", "grc"),
    "HEBREW": ("he",),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "MYANMAR": ("my",),
    "ORIYA": ("or",),
    "TELUGU": ("te",),
    "THAI": ("th",),
}
"""Languages whose voices speak a script, by its name in Unicode."""
_WORD = re.compile(r"[^\W\d_]{2,}")
"""Matches a word of two letters or more: a letter alone is rightly spoken by its name."""


def require_sayable(text: str, language: str, voice: str) -> None:
    """Raise ``RecipeError`` where ``voice``, of ``language`` (``en``, ``fr-fr``), would spell out a
    word."""
    language = language.lower().partition("-")[0]
    unsaid = list(_unsaid(text, language))
    if not unsaid:
        return
    # Chinese characters may be Japanese: kana next to them tell, and so does the voice.
    script, word = min(unsaid, key=lambda each: each[0] == "CJK")
    known = () if language == "ja" else _LANGUAGES.get(script, ())
    other = f"name one that says it (voice.name: {' or '.join(known[:3])}), or " if known else ""
    raise RecipeError(
        "text",
        f"the voice {voice} would spell out {excerpt(word)}, letter by letter: {other}write it in"
        " letters that this one says",
    )


def _unsaid(text: str, language: str) -> Iterator[tuple[str, str]]:
    """Scripts in ``text`` that voices of ``language`` do not speak, each with a word in it."""
    for word in _WORD.findall(unicodedata.normalize("NFKC", text)):
        for letter in word:
            script = unicodedata.name(letter, "?").partition(" ")[0].partition("-")[0]
            if script not in _SAID_BY_ALL and language not in _LANGUAGES.get(script, ()):
                yield script, word
