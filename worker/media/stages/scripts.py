"""Which words a voice can only spell out: those in letters that its language is not written in.

eSpeak NG says some scripts by whichever voice, in the language that has them. Of the rest it says
"Japanese letter" and the like, 0.8 s for each. What is here was tried with 1.52, voice by voice.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Final

from worker.media.errors import RecipeError
from worker.protocol import excerpt

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
"""Of voices that say a script."""
_WORD = re.compile(r"[^\W\d_]{2,}")
"""A letter by itself is rightly said by its name."""


def require_sayable(text: str, language: str, voice: str) -> None:
    """Raise ``RecipeError`` where ``voice``, of ``language`` (``en``, ``fr-fr``), would spell out a
    word."""
    language = language.lower().partition("-")[0]
    unsaid = list(_unsaid(text, language))
    if not unsaid:
        return
    # Chinese characters are Japanese ones too: kana beside them say which, and so does the voice.
    script, word = min(unsaid, key=lambda each: each[0] == "CJK")
    known = () if language == "ja" else _LANGUAGES.get(script, ())
    other = f"name one that says it (voice.name: {' or '.join(known[:3])}), or " if known else ""
    raise RecipeError(
        "text",
        f"the voice {voice} would spell out {excerpt(word)}, letter by letter: {other}write it in"
        " letters that this one says",
    )


def _unsaid(text: str, language: str) -> Iterator[tuple[str, str]]:
    """Scripts that it does not say, with a word of each."""
    for word in _WORD.findall(unicodedata.normalize("NFKC", text)):
        for letter in word:
            script = unicodedata.name(letter, "?").partition(" ")[0].partition("-")[0]
            if script not in _SAID_BY_ALL and language not in _LANGUAGES.get(script, ()):
                yield script, word
