"""The seeded grammar that writes the demo model's training text.

Data flow: `words` (tables) -> this module (casts and stories) -> `dialogue` (chat) -> `train`.
Everything is a pure function of a `random.Random`, so a seed names a corpus.

A story is a cast plus a plot. A plot is a list of beats; a beat is a tuple of alternative
templates. Templates use two notations: ``[a|b]`` picks one branch (branches nest), ``{slot}`` takes
a value from the cast. Sentence capitals and "a"/"an" are mended at the end, so templates may
ignore both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from tools.demo_model import plots, words

_CHOICE: Final = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START: Final = re.compile(r"(^|\n|[.!?] |[.]\" )(\"?)([a-z])")
_ARTICLE: Final = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|hones)")


@dataclass(frozen=True)
class Being:
    """A character: a name, a noun ("fox") with a size, and a grammatical gender."""

    name: str
    kind: str
    size: str
    female: bool

    def slots(self, suffix: str) -> dict[str, str]:
        """The template values of this character; `suffix` tells the two characters apart."""
        he, him, his = ("she", "her", "her") if self.female else ("he", "him", "his")
        return {
            f"name{suffix}": self.name,
            f"kind{suffix}": self.kind,
            f"size{suffix}": self.size,
            f"he{suffix}": he,
            f"him{suffix}": him,
            f"his{suffix}": his,
            f"He{suffix}": he.capitalize(),
            f"His{suffix}": his.capitalize(),
            f"self{suffix}": him + "self",
        }


@dataclass(frozen=True)
class Brief:
    """A reader's wishes for a story; None leaves a choice to chance."""

    kind: str | None = None
    name: str | None = None
    thing: str | None = None
    place: str | None = None
    virtue: str | None = None
    plot: str | None = None
    short: bool = False


@dataclass(frozen=True)
class Story:
    """A finished story with the facts that a follow-up question may ask about."""

    text: str
    hero: Being
    friend: Being
    place: str
    thing: str
    plot: str


def expand(rng: Random, template: str, slots: Mapping[str, str]) -> str:
    """Resolve every ``[a|b]`` innermost first, then every ``{slot}``, then mend the surface."""
    while match := _CHOICE.search(template):
        pick = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + pick + template[match.end() :]
    return mend(template.format_map(slots))


def articles(text: str) -> str:
    """Turn "a owl" into "an owl" and leave the rest alone."""
    return _ARTICLE.sub(r"\1n ", text)


def mend(text: str) -> str:
    """Capitalise sentence starts, mend the articles, drop doubled spaces."""
    text = articles(re.sub(r"  +", " ", text).strip())
    return _SENTENCE_START.sub(lambda m: m.group(1) + m.group(2) + m.group(3).upper(), text)


def invented_name(rng: Random) -> str:
    """An invented name, which teaches the model to copy names rather than recite them."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def being(rng: Random, kind: str | None = None, name: str | None = None) -> Being:
    """A character; `kind` and `name` fix what the caller already knows."""
    if kind is None:
        pool = rng.choices(
            (words.ANIMALS, words.GIRL_KINDS, words.BOY_KINDS, words.WORKERS), (8, 2, 2, 4)
        )[0]
        kind = rng.choice(pool)
    if kind in words.GIRL_KINDS or name in words.GIRLS:
        female = True
    elif kind in words.BOY_KINDS or name in words.BOYS:
        female = False
    else:
        female = rng.random() < 0.5
    if name is None:
        known = words.GIRLS if female else words.BOYS
        name = invented_name(rng) if rng.random() < 0.06 else rng.choice(known)
    if kind in ("girl", "boy"):
        sizes: Sequence[str] = ("little", "small", "young")
    elif kind.startswith("grand"):
        sizes = ("old",)
    else:
        sizes = words.SIZES
    return Being(name, kind, rng.choice(sizes), female)


def _pick_plot(rng: Random, brief: Brief) -> str:
    if brief.plot is not None:
        return brief.plot
    if brief.thing is not None:
        return rng.choice(plots.ABOUT_THINGS)
    if brief.virtue is not None:
        return rng.choice(plots.ABOUT_VIRTUES[brief.virtue])
    return rng.choice(tuple(plots.PLOTS))


def story(rng: Random, brief: Brief | None = None) -> Story:
    """Write one story of about 80 to 250 tokens that honours `brief`."""
    brief = brief or Brief()
    hero = being(rng, brief.kind, brief.name)
    friend = being(rng)
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = being(rng)
    place, at = rng.choice(words.PLACES)
    if brief.place is not None:
        place, at = brief.place, dict(words.PLACES)[brief.place]
    thing = brief.thing or rng.choice(words.THINGS)
    plot = _pick_plot(rng, brief)
    noise, cause = rng.choice(words.NOISES)
    trait, trait2 = rng.sample(words.TRAITS, 2)
    food, food2 = rng.sample(words.FOODS, 2)
    slots = {
        **hero.slots(""),
        **friend.slots("2"),
        "trait": trait,
        "trait2": trait2,
        "place": place,
        "at": f"{at} the",
        "at_a": f"{at} a {rng.choice(words.PLACE_LOOKS)} {place}",
        "thing": thing,
        "look": rng.choice(words.THING_LOOKS),
        "food": food,
        "food2": food2,
        "skill": rng.choice(words.SKILLS),
        "noise": noise,
        "cause": cause,
        "plant": rng.choice(words.PLANTS),
        "color": rng.choice(words.COLORS),
    }
    paragraphs = _outline(rng, plot, brief)
    text = "\n\n".join(
        " ".join(expand(rng, sentence, slots) for sentence in paragraph) for paragraph in paragraphs
    )
    return Story(text, hero, friend, place, thing, plot)


def _outline(rng: Random, plot: str, brief: Brief) -> list[list[str]]:
    """Choose a template per beat and lay the beats out in one to four paragraphs."""
    beats = plots.PLOTS[plot]
    start = [rng.choice(plots.OPENINGS)]
    if not brief.short:
        start += rng.sample(plots.COLOUR, rng.choice((1, 1, 2)))
    middle = [rng.choice(beat) for beat in beats]
    if brief.short:
        ending = [rng.choice(plots.FEELINGS)]
    else:
        ending = [rng.choice(plots.FEELINGS), rng.choice(plots.CLOSINGS)]
    lesson = brief.virtue or (rng.choice(plots.LESSONS_OF[plot]) if rng.random() < 0.3 else None)
    if lesson is not None:
        ending.append(rng.choice(plots.LESSONS[lesson]))
    if brief.short or rng.random() < 0.25:
        return [start + middle + ending]
    # A name without a space before it is another token, which makes it harder to copy: a
    # paragraph never begins with one.
    cut = len(middle) // 2 + rng.choice((0, 1))
    parts = [start, middle[:cut], middle[cut:], ending]
    if rng.random() < 0.4:
        parts = [start + middle[:cut], middle[cut:] + ending]
    paragraphs = [parts[0]]
    for part in parts[1:]:
        if part[0].startswith("{name"):
            paragraphs[-1] = paragraphs[-1] + part
        else:
            paragraphs.append(part)
    return paragraphs


def plain_document(rng: Random) -> str:
    """One document without roles: mostly stories, with a few questions and answers."""
    if rng.random() < 0.05:
        return exercise_document(rng)
    if rng.random() < 0.05:
        question, answer = rng.choice(words.FACTS)
        return f"{question} {answer}" if rng.random() < 0.5 else f"Q: {question}\nA: {answer}"
    text = story(rng, replace(Brief(), short=rng.random() < 0.2)).text
    if rng.random() < 0.12:
        # Enter mid-story, so that a prompt that is no opening still finds a way on.
        sentences = re.split(r"(?<=[.!?]) ", text)
        text = " ".join(sentences[rng.randrange(max(1, len(sentences) - 3)) :])
    return text


_HOLDS: Final = (
    ("{n} has a {c} {t}.", "What does {n} have?", "a {c} {t}."),
    ("{n} has a {c} {t}.", "Who has the {t}?", "it is {n}."),
    ("{n} has a {c} {t}.", "What color is the {t} of {n}?", "it is {c}."),
    ("{n} is a {k}.", "Who is {n}?", "{n} is a {k}."),
    ("{n} is a {k}.", "Who is the {k}?", "the {k} is {n}."),
    ("{n} lives {at} the {p}.", "Where does {n} live?", "{at} the {p}."),
    ("{n} the {k} lives {at} the {p}.", "Who lives {at} the {p}?", "it is {n} the {k}."),
    ("{n} the {k} likes the {k2}.", "Who likes the {k2}?", "the {k}, {n}."),
    ("{n} gave the {t} to {n2}.", "Who gave the {t} to {n2}?", "it was {n}."),
)


@dataclass(frozen=True)
class Drill:
    """Facts about a few characters, with questions whose answers stand in the facts."""

    facts: str
    questions: tuple[tuple[str, str], ...]


def drill(rng: Random) -> Drill:
    """A reading exercise: nothing in its answers can be guessed, all of it can be looked up."""
    many = rng.choice((1, 2, 2, 3, 4))
    names = [
        invented_name(rng) if rng.random() < 0.06 else name
        for name in rng.sample(words.GIRLS + words.BOYS, many + 1)
    ]
    kinds = rng.sample(words.ANIMALS, many + 1)
    things = rng.sample(words.THINGS, many)
    places = rng.sample(words.PLACES, many)
    facts, questions = [], []
    for index in range(many):
        place, at = places[index]
        slots = {
            "n": names[index],
            "n2": names[index + 1],
            "k": kinds[index],
            "k2": kinds[index + 1],
            "t": things[index],
            "c": rng.choice(words.COLORS),
            "p": place,
            "at": at,
        }
        fact, question, answer = (mend(part.format_map(slots)) for part in rng.choice(_HOLDS))
        facts.append(fact)
        questions.append((question, answer))
    rng.shuffle(questions)
    # A name without a space before it is another token; an opening word spares the model that.
    opening = rng.choice(("Listen:", "I know that", "You see,", "Look,", "We know that"))
    return Drill(" ".join((opening, *facts)), tuple(questions))


def exercise_document(rng: Random) -> str:
    """A drill as running text: the facts, then each question with its answer."""
    exercise = drill(rng)
    return " ".join((exercise.facts, *(f"{q} {a}" for q, a in exercise.questions)))
