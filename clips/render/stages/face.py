"""Positions and colors of a procedural face, and how a prompt chooses among them.

Coordinates are those of the picture: -1 to 1 from left to right and from top to bottom.
"""

import random
import re
from dataclasses import dataclass
from itertools import pairwise

Colour = tuple[float, float, float]

EYES = ((-0.21, -0.12), (0.21, -0.12))
EYE_RADII = (0.105, 0.062)
MOUTH = (0.0, 0.36)
MOUTH_RADII = (0.17, 0.035)
FACE = (0.0, 0.08)
FACE_RADII = (0.50, 0.64)

HAIR: dict[str, Colour] = {
    "black": (0.10, 0.09, 0.10),
    "brown": (0.36, 0.22, 0.12),
    "blond": (0.88, 0.74, 0.40),
    "red": (0.70, 0.25, 0.12),
    "grey": (0.62, 0.62, 0.64),
    "blue": (0.20, 0.35, 0.85),
}
SKIN: dict[str, Colour] = {
    "pale": (0.97, 0.85, 0.77),
    "tan": (0.86, 0.66, 0.50),
    "dark": (0.48, 0.32, 0.23),
}
BACKDROP: dict[str, Colour] = {
    "studio": (0.80, 0.84, 0.90),
    "forest": (0.24, 0.46, 0.28),
    "sunset": (0.95, 0.58, 0.38),
    "night": (0.10, 0.12, 0.26),
}
_SYNONYMS = {
    "blonde": "blond",
    "gray": "grey",
    "ginger": "red",
    "brunette": "brown",
    "golden": "blond",
    "green": "forest",
    "spectacles": "glasses",
}
_EVERY = frozenset((*HAIR, *SKIN, *BACKDROP, "glasses", "bald", "beard"))
_NOT = frozenset(("no", "not", "without"))
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class Look:
    """Appearance of one face. ``hair`` is "" for a bald one."""

    hair: str
    skin: str
    backdrop: str
    has_glasses: bool
    has_beard: bool


def words_of(prompt: str) -> list[str]:
    """The words of ``prompt`` in order, in lower case, synonyms as one word."""
    return [_SYNONYMS.get(word, word) for word in _WORD.findall(prompt.lower())]


def look_of(prompt: str, seed: int) -> Look:
    """The face that ``prompt`` describes, the rest chosen by ``seed``: "dark skin" and "blue hair"
    are read by their nouns, other words alone."""
    words = words_of(prompt)
    rng = random.Random(f"{seed} {sorted(set(words) & _EVERY)}")
    hair = _named(words, HAIR, "hair") or rng.choice(list(HAIR))
    skin = _named(words, SKIN, "skin") or rng.choice(list(SKIN))
    backdrop = _named(words, BACKDROP, "background") or rng.choice(list(BACKDROP))
    return Look(
        hair="" if _says(words, "bald", False) else hair,
        skin=skin,
        backdrop=backdrop,
        has_glasses=_says(words, "glasses", rng.random() < 0.25),
        has_beard=_says(words, "beard", rng.random() < 0.2),
    )


def _says(words: list[str], what: str, otherwise: bool) -> bool:
    """Whether ``what`` is present, False after "no"; ``otherwise`` if no word mentions it."""
    if what not in words:
        return otherwise
    at = words.index(what)
    return not _NOT.intersection(words[max(0, at - 2) : at])


def _named(words: list[str], values: dict[str, Colour], noun: str) -> str:
    """The value that stands before ``noun``, otherwise the first; empty without any."""
    named = [word for word, following in pairwise(words) if word in values and following == noun]
    return next(iter([*named, *(word for word in words if word in values)]), "")
