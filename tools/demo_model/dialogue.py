"""Chat turns for the demo model: requests, answers, follow-ups, and careless typing.

A chat is a few exchanges under one `Manner` (what the system message asks for). Each exchange
writer returns user and assistant lines; the assistant lines always pick up the topic of the
request. User lines are then roughened (`roughen`) the way that people really type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from tools.demo_model import grammar, plots, words
from tools.demo_model.grammar import Brief, Story, articles, mend

Role = Literal["system", "user", "assistant"]
Exchange = tuple[str, str]  # (what the user says, what the assistant answers)


@dataclass(frozen=True)
class Turn:
    """One message of a chat."""

    role: Role
    text: str


@dataclass(frozen=True)
class Manner:
    """How the system message wants the assistant to speak."""

    system: str | None = None
    short: bool = False
    pirate: bool = False
    name: str | None = None


_HELPFUL: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Be kind and clear.",
    "You are a friendly storyteller.",
    "You tell stories to children.",
    "You are a polite assistant who likes stories.",
    "Be helpful.",
)
_SHORT: Final = (
    "Answer briefly.",
    "Be brief.",
    "You are a helpful assistant. Keep your answers short.",
    "Use as few words as you can.",
    "Be concise.",
)
_PIRATE: Final = (
    "You are a pirate.",
    "Talk like a pirate.",
    "You are a helpful pirate.",
    "Answer like a pirate.",
)


def pick(rng: Random, template: str) -> str:
    """Resolve the ``[a|b]`` choices of a template without slots."""
    return grammar.expand(rng, template, {})


def manner(rng: Random) -> Manner:
    """No system message most of the time; else one of a few that change the answers."""
    draw = rng.random()
    if draw < 0.6:
        return Manner()
    if draw < 0.78:
        return Manner(rng.choice(_HELPFUL))
    if draw < 0.86:
        return Manner(rng.choice(_SHORT), short=True)
    if draw < 0.93:
        return Manner(rng.choice(_PIRATE), pirate=True)
    name = rng.choice(words.GIRLS + words.BOYS)
    job = rng.choice(("an assistant", "a storyteller", "a helper", "a friendly robot"))
    wording = rng.choice((f"You are {name}, {job}.", f"Your name is {name}. You are {job}."))
    return Manner(wording, name=name)


# --- stories and what follows them ---------------------------------------------------------------

_ASK: Final = (
    "[Tell me|Please tell me|Can you tell me|Could you tell me|I want to hear|I would like|Write|"
    "Write me|Give me|Please write] [a|a short|a little|a nice] story"
)
_LEAD: Final = (
    "",
    "",
    "",
    "[Of course!|Sure!|Gladly!|With pleasure.|Yes, of course.] ",
    "[Of course!|Sure!] [Here is|This is] [a story|your story] about {topic}. ",
    "Here is a story about {topic}. ",
)


def _briefing(rng: Random) -> tuple[Brief, str]:
    """What to ask for, and the words for it ("" when the user leaves the choice open)."""
    kind = rng.choice(words.ANIMALS + words.GIRL_KINDS + words.BOY_KINDS + words.WORKERS)
    thing = rng.choice(words.THINGS)
    place, at = rng.choice(words.PLACES)
    size = rng.choice(("", "", "little ", "brave ", "small "))
    draw = rng.random()
    if draw < 0.12:
        return Brief(), ""
    if draw < 0.40:
        return Brief(kind=kind), f"a {size}{kind}"
    if draw < 0.55:
        girls, boys = words.GIRLS, words.BOYS
        if kind in words.GIRL_KINDS:
            boys = girls
        elif kind in words.BOY_KINDS:
            girls = boys
        name = rng.choice(girls + boys) if rng.random() < 0.6 else grammar.invented_name(rng)
        link = rng.choice(("named", "called"))
        return Brief(kind=kind, name=name), f"a {size}{kind} {link} {name}"
    if draw < 0.66:
        return Brief(thing=thing), f"a {rng.choice(('', 'lost ', 'magic '))}{thing}"
    if draw < 0.78:
        return Brief(kind=kind, thing=thing), f"a {kind} and a {thing}"
    if draw < 0.86:
        return Brief(kind=kind, place=place), f"a {size}{kind} {at} the {place}"
    if draw < 0.91:
        return Brief(place=place), f"the {place}"
    virtue = rng.choice(words.VIRTUES)
    return Brief(virtue=virtue), virtue


def _tell(rng: Random, brief: Brief, topic: str, how: Manner) -> tuple[str, Story]:
    short = how.short or rng.random() < 0.3
    tale = grammar.story(rng, Brief(**{**brief.__dict__, "short": short}))
    topic = topic or f"a {tale.hero.kind}"
    lead = "" if how.short else rng.choice(_LEAD)
    lead = grammar.expand(rng, lead, {"topic": topic}) if lead else ""
    return f"{lead} {tale.text}".strip(), tale


def _after_story(rng: Random, tale: Story, how: Manner) -> Exchange:
    hero, friend = tale.hero, tale.friend
    slots = {
        **hero.slots(""),
        **friend.slots("2"),
        "place": tale.place,
        "thing": tale.thing,
        "at": dict(words.PLACES)[tale.place],
    }
    summary = plots.SUMMARIES[tale.plot]
    pairs: list[tuple[str, str]] = [
        ("What was the name of the {kind}?", "The {kind} was called {name}."),
        ("What was the {kind} called?", "{His} name was {name}."),
        ("Who was the {kind2}?", "That was {name2}, who became a friend of {name}."),
        ("Where did {name} live?", "{at} the {place}."),
        ("What was the story about?", f"it tells how {summary}"),
        ("Can you sum it up?", f"in short, {summary}"),
        ("Make it shorter.", f"once upon a time, {summary}"),
        ("Who is {name}?", "that is the {size} {kind} in the story."),
        ("Who is {name2}?", "that is the {kind2} in the story."),
        (
            "[I like it|I liked it|That was nice|Great story|Good story|wow|Nice]!",
            "[I am glad that you like it|Thank you|How nice of you]! [Shall I tell you another "
            "one?|{name} would be happy to hear that.|I like {name} too.]",
        ),
        (
            "[I do not like it|That was boring|Bad story].",
            "I am sorry. [Shall I try another one?|I will try to do better next time.]",
        ),
        (
            "What happened next?",
            "in the end {name} and {name2} stayed friends, and one day they [built a "
            "boat|went to the sea|planted a tree|opened a small shop] together.",
        ),
        ("Why?", "Because {name} had a good heart, and {name2} saw it."),
    ]
    question, answer = rng.choice(pairs)
    return grammar.expand(rng, question, slots), grammar.expand(rng, answer, slots)


def stories(rng: Random, how: Manner) -> list[Exchange]:
    """A story request, often with a question about the story or a wish for another one."""
    brief, topic = _briefing(rng)
    ask = pick(rng, _ASK) + (f" about {topic}" if topic else "")
    if topic and rng.random() < 0.2:
        ask = rng.choice(
            (f"A story about {topic}", f"Story about {topic}", topic, f"Something about {topic}")
        )
    text, tale = _tell(rng, brief, articles(topic), how)
    ask = mend(ask) + rng.choice((".", "", "?" if ask[0] == "C" else ".", ", please."))
    out = [(ask, text)]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        if rng.random() < 0.25:
            brief, topic = _briefing(rng)
            again = "[Another one|Tell me another one|One more|Now another story|Next story]"
            again = pick(rng, again) + (f" about {topic}" if topic else "")
            text, tale = _tell(rng, brief, articles(topic), how)
            out.append((mend(again) + rng.choice((".", "", ", please")), text))
        else:
            out.append(_after_story(rng, tale, how))
    return out


# --- small talk ----------------------------------------------------------------------------------


def greeting(rng: Random, how: Manner) -> list[Exchange]:
    user = "[Hello|Hi|Hey|Hello there|Good morning|Good evening|Hi there|Say hello|Say hi][!|.|]"
    reply = (
        "[Hello|Hi|Hello there|Good day]! [How can I help you|What would you like to hear|Shall I "
        "tell you a story|What shall we talk about][ today|]?"
    )
    return [(pick(rng, user), pick(rng, "Hello!" if how.short else reply))]


def how_are_you(rng: Random, how: Manner) -> list[Exchange]:
    user = "[How are you|How are you doing|How are you today|Are you well|How is it going]?"
    reply = (
        "[I am fine|I am very well|I am well], thank you! [How are you?|And you?|I was just "
        "thinking about a new story.]"
    )
    out = [(pick(rng, user), pick(rng, "I am fine." if how.short else reply))]
    if rng.random() < 0.4:
        out.append(
            (
                pick(rng, "[I am fine|I am good|Good|Fine|I am well too][, thanks|]."),
                pick(
                    rng,
                    "[I am glad to hear that|That is good to hear]! [What would you like to "
                    "do?|Would you like a story?]",
                ),
            )
        )
    return out


def who_are_you(rng: Random, how: Manner) -> list[Exchange]:
    user = (
        "[Who are you|What are you|What is your name|Tell me about yourself|Who made you|Are you a "
        "robot|Are you human|What model are you|Introduce yourself]?"
    )
    if how.name is not None:
        return [
            (
                pick(rng, user),
                f"I am {how.name}. "
                + pick(
                    rng, "[How can I help you?|I like to tell stories.|It is nice to meet you.]"
                ),
            )
        ]
    reply = (
        "I am [the Tidegate demo model|a very small language model|a small demo model], and I "
        "[like to tell stories|tell short stories|was trained to tell "
        "stories and to chat a little]."
    )
    return [(pick(rng, user), pick(rng, reply))]


def what_can_you_do(rng: Random, how: Manner) -> list[Exchange]:
    user = "[What can you do|How can you help me|What do you know|Help|Can you help me]?"
    reply = (
        "I can [tell you a story|tell short stories], [write a small poem|tell a joke|ask a riddle]"
        ", or [answer a simple question|chat with you]. [Just ask!|What would you like?|Try: a "
        "story about a fox.]"
    )
    return [(pick(rng, user), pick(rng, reply))]


def thanks(rng: Random, how: Manner) -> list[Exchange]:
    user = "[Thank you|Thanks|Thanks a lot|Thank you very much|Great, thanks][!|.|]"
    reply = "[You are welcome|My pleasure|Gladly|Any time]!"
    if not how.short:
        reply += "[| Is there anything else?| Come back soon.| I hope it helped.]"
    return [(pick(rng, user), pick(rng, reply))]


def goodbye(rng: Random, how: Manner) -> list[Exchange]:
    user = "[Goodbye|Bye|Good night|See you|See you later|I have to go now][!|.|]"
    reply = "[Goodbye|Good night|See you soon|Farewell]! [Sleep well.|Take care.|Come back soon.|]"
    return [(pick(rng, user), pick(rng, reply))]


def my_name(rng: Random, how: Manner) -> list[Exchange]:
    """The user gives a name and may ask for it back: practice in copying from the context."""
    name = rng.choice(words.GIRLS + words.BOYS)
    if rng.random() < 0.5:
        name = grammar.invented_name(rng)
    user = pick(rng, "[My name is|I am|Hello, my name is|Hi, I am|Call me]") + f" {name}."
    reply = pick(
        rng,
        f"[Nice to meet you|Hello|It is a pleasure to meet you], {name}! "
        "[What would you like to hear?|How can I help you?|How are you?]",
    )
    out = [(user, reply)]
    if rng.random() < 0.6:
        if rng.random() < 0.4:
            out += rng.choice((fact, joke, how_are_you))(rng, how)
        out.append(
            (
                pick(rng, "[What is my name|Who am I|Do you remember my name]?"),
                pick(rng, f"[Your name is {name}|You are {name}]."),
            )
        )
    return out


def feeling(rng: Random, how: Manner) -> list[Exchange]:
    mood = rng.choice(("sad", "tired", "bored", "happy", "lonely", "angry", "afraid", "hungry"))
    user = pick(rng, f"[I am|I feel|Today I am|I am so|I'm] {mood}.")
    comfort = {
        "sad": "I am sorry that you are sad. [Would a story help?|I am here if you want to talk.]",
        "tired": "Then [rest a little|close your eyes for a while]. I can tell you a quiet story.",
        "bored": "Then let us do something! [How about a riddle?|How about a story?|Ask me for a "
        "joke.]",
        "happy": "That is wonderful! [What made you happy?|I am glad to hear it.]",
        "lonely": "You are not alone, I am here. [Shall I tell you a story about a friend?|Tell me "
        "about your day.]",
        "angry": "Take a deep breath. [Do you want to tell me what happened?|It will pass.]",
        "afraid": "Do not be afraid. [Most scary things are small in the light.|I am here with "
        "you.]",
        "hungry": "How about some [" + "|".join(words.FOODS) + "]?",
    }
    return [(user, pick(rng, comfort[mood]))]


# --- simple knowledge ----------------------------------------------------------------------------


def fact(rng: Random, how: Manner) -> list[Exchange]:
    question, answer = rng.choice(words.FACTS)
    return [(question, answer)]


def capital(rng: Random, how: Manner) -> list[Exchange]:
    out: list[Exchange] = []
    for country, city in rng.sample(words.CAPITALS, rng.choice((1, 1, 2))):
        ask = f"What is the capital of {country}?" if not out else f"And of {country}?"
        if rng.random() < 0.2:
            out.append((f"Where is {city}?", f"It is in {country}."))
        else:
            full = f"The capital of {country} is {city}."
            out.append((ask, f"{city}." if how.short else full))
    return out


def animal(rng: Random, how: Manner) -> list[Exchange]:
    kind, food, home, sound = rng.choice(words.ANIMAL_FACTS)
    question, answer = rng.choice(
        (
            (f"What does a {kind} eat?", f"A {kind} eats {food}."),
            (f"Where does a {kind} live?", f"A {kind} lives in a {home}."),
            (f"What sound does a {kind} make?", f"A {kind} {sound}."),
            (
                f"What is a {kind}?",
                f"A {kind} is an animal. It eats {food}, and its home is a {home}.",
            ),
            (
                f"Tell me about the {kind}.",
                f"The {kind} eats {food} and lives in a {home}. It {sound}.",
            ),
        )
    )
    return [(mend(question), mend(answer))]


def reading(rng: Random, how: Manner) -> list[Exchange]:
    """Questions about facts that the user has just told."""
    exercise = grammar.drill(rng)
    (question, answer), *more = exercise.questions
    return [(f"{exercise.facts} {question}", answer), *more]


def describe(rng: Random, how: Manner) -> list[Exchange]:
    """A few sentences about a place."""
    place, _ = rng.choice(words.PLACES)
    look, look2 = rng.sample(words.PLACE_LOOKS, 2)
    ask = "[Describe|Tell me about|What do you know about|Talk about|Can you describe] the {place}."
    first = f"the {{place}} is {look} and {look2}[| at this hour| in the morning| in winter]."
    second = (
        "[the air smells of rain|the wind plays with the leaves|a bird sings far away|the light is "
        "soft and golden|small lamps shine in the dark|people come here to rest]."
    )
    third = (
        "if you [listen|wait|sit still], you can hear [the water|your own heart|an old song|a bell "
        "far away]."
    )
    parts = [first] if how.short else [first, second] + [third] * rng.choice((0, 1))
    slots = {"place": place}
    answer = " ".join(grammar.expand(rng, part, slots) for part in parts)
    return [(grammar.expand(rng, ask, slots), answer)]


def opposite(rng: Random, how: Manner) -> list[Exchange]:
    pair = list(rng.choice(words.OPPOSITES))
    rng.shuffle(pair)
    left, right = pair
    return [(f"What is the opposite of {left}?", f"The opposite of {left} is {right}.")]


def sums(rng: Random, how: Manner) -> list[Exchange]:
    a, b = rng.randrange(11), rng.randrange(11)
    if rng.random() < 0.5:
        a, b = max(a, b), min(a, b)
        sign, word, total = "-", "minus", a - b
    else:
        sign, word, total = "+", "plus", a + b
    if rng.random() < 0.5:
        ask = rng.choice((f"What is {a} {sign} {b}?", f"{a} {sign} {b}", f"{a}{sign}{b}=?"))
        return [(ask, f"{total}." if how.short else f"{a} {sign} {b} is {total}.")]
    x, y, z = words.NUMBERS[a], words.NUMBERS[b], words.NUMBERS[total]
    return [(f"What is {x} {word} {y}?", mend(f"{x} {word} {y} is {z}."))]


def counting(rng: Random, how: Manner) -> list[Exchange]:
    top = rng.randrange(3, 21)
    if rng.random() < 0.3:
        return [
            (
                "What are the days of the week?",
                f"The days are {', '.join(words.DAYS[:6])} and {words.DAYS[6]}.",
            )
        ]
    if rng.random() < 0.5:
        return [(f"Count to {top}.", ", ".join(str(n) for n in range(1, top + 1)) + ".")]
    names = ", ".join(words.NUMBERS[1 : top + 1])
    return [(f"Count to {words.NUMBERS[top]}.", mend(names + "."))]


def lists(rng: Random, how: Manner) -> list[Exchange]:
    n = rng.randrange(2, 6)
    topic, pool = rng.choice(
        (
            ("animals", words.ANIMALS),
            ("colors", tuple(words.COLORS)),
            ("names for a cat", words.GIRLS + words.BOYS),
            ("names for a dog", words.BOYS),
            ("foods", words.FOODS),
            ("things in a house", words.THINGS),
            ("jobs", words.WORKERS),
        )
    )
    items = rng.sample(pool, n)
    ask = pick(rng, "[Name|Give me|List|Tell me]") + f" {words.NUMBERS[n]} {topic}."
    if rng.random() < 0.4:
        return [(ask, "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)))]
    return [(ask, mend(f"{', '.join(items[:-1])} and {items[-1]}."))]


def joke(rng: Random, how: Manner) -> list[Exchange]:
    ask = "[Tell me a joke|Do you know a joke|Make me laugh|A joke, please|Say something funny]."
    return [(pick(rng, ask), rng.choice(words.JOKES))]


def riddle(rng: Random, how: Manner) -> list[Exchange]:
    text, answer = rng.choice(words.RIDDLES)
    ask = pick(rng, "[Ask me a riddle|Tell me a riddle|Give me a riddle|Do you know a riddle].")
    out = [(ask, text)]
    if rng.random() < 0.5:
        guess = rng.choice((answer, f"Is it {answer}?", f"It is {answer}."))
        out.append((guess, pick(rng, f"[Yes|Right|Well done]! It is {answer}.")))
    else:
        give_up = "[I do not know|Tell me|What is it|I give up|No idea]."
        out.append((pick(rng, give_up), f"It is {answer}."))
    return out


_COUPLETS: Final = (
    "the {x} sat down beside the sea\nand drank a cup of cherry tea.",
    "the moon came up above the hill,\nand all the world was soft and still.",
    "the {x} looked up and saw a star,\nso small and bright, so very far.",
    "the wind went singing through the trees\nand told its secrets to the bees.",
    "a little {x}, a little light,\na little song to end the night.",
    "the rain fell softly on the ground,\nand peace and quiet lay all around.",
    "the {x} began to dream and sway\nand slept until the break of day.",
    "so come and sit with me a while,\nand let the {x} make you smile.",
    "the river runs, the river bends,\nand all along it we are friends.",
    "the {x} is near, the night is deep,\nand all the birds are fast asleep.",
    "oh {x}, oh {x}, so fine and free,\nyou are the only one for me.",
    "the road is long, the road is wide,\nthe {x} is always at my side.",
)
_HAIKU: Final = (
    "An old, quiet pond.\nA small frog jumps from the stone.\nThe water answers.",
    "Snow on the rooftop.\nOne crow is counting the stars.\nMorning comes slowly.",
    "The tide goes out now.\nLittle shells wait in the sand.\nThe moon calls them home.",
    "Rain on the window.\nThe cat dreams of silver fish.\nThe tea is still warm.",
)


def poem(rng: Random, how: Manner) -> list[Exchange]:
    if rng.random() < 0.25:
        ask = pick(rng, "[Write a haiku|Write me a haiku|Haiku, please|Do you know a haiku].")
        return [(ask, rng.choice(_HAIKU))]
    topic = rng.choice(words.ANIMALS + words.THINGS + tuple(place for place, _ in words.PLACES))
    ask = pick(rng, "[Write|Write me|Tell me|Please write|Can you write] a [poem|short poem|rhyme]")
    ask = mend(f"{ask} about {rng.choice(('a', 'the'))} {topic}.")
    first = [c for c in _COUPLETS if "{x}" in c]
    picked = [rng.choice(first)]
    rest = [c for c in _COUPLETS if c not in picked]
    picked += rng.sample(rest, 1 if how.short else rng.choice((1, 2, 3)))
    lines = "\n".join(picked).format(x=topic)
    return [(ask, mend(lines))]


# --- what the model cannot do --------------------------------------------------------------------


def unknown(rng: Random, how: Manner) -> list[Exchange]:
    """A topic outside the grammar: admit it, offer a story, and tell it when asked."""
    topic = rng.choice(words.UNKNOWN_TOPICS)
    if rng.random() < 0.5:
        topic = grammar.invented_name(rng).lower() + rng.choice(
            ("", " " + grammar.invented_name(rng).lower())
        )
    ask = pick(
        rng,
        "[Tell me about|What is|Explain|What do you know about|Can you explain|How does|Write an "
        "essay about|Tell me a story about|Write code for|Translate|Talk about|Describe|I need "
        "help with|Why|Do you like|Summarize|Compare]",
    )
    ask += f" {topic}" + rng.choice(("", ".", "?", " to me", " work?", " in simple words."))
    if rng.random() < 0.5:
        ask = rng.choice(words.REQUESTS_BEYOND)
    kind = rng.choice(words.ANIMALS)
    offer = articles(f"a story about a {kind}")
    refuse = (
        "[I do not know much about that|I am too small to know that|That is too hard for me|I have "
        "not learned about that yet|I am sorry, I do not know that]"
    )
    if rng.random() < 0.4:
        text, _ = _tell(rng, Brief(kind=kind, short=True), "", Manner(short=True))
        return [(ask, pick(rng, f"{refuse}, but here is {offer}. ") + " " + text)]
    out = [
        (
            ask,
            pick(rng, f"{refuse}[, but I can tell you {offer}|. Would you like {offer}]").rstrip(
                "."
            )
            + ".",
        )
    ]
    if "Would" in out[0][1]:
        out[0] = (ask, out[0][1][:-1] + "?")
    if rng.random() < 0.5:
        yes = pick(rng, "[Yes|Yes, please|OK|Sure|Please do|Go on|Why not|Yes!|Go ahead]")
        out.append((yes, _tell(rng, Brief(kind=kind), "", how)[0]))
    return out


def puzzled(rng: Random, how: Manner) -> list[Exchange]:
    """Other scripts, emoji and key smashing."""
    user = rng.choice(words.FOREIGN)
    if rng.random() < 0.5:
        user = "".join(
            rng.choice("asdfghjklqwertyuiop ;.,!?123") for _ in range(rng.randrange(1, 14))
        )
    reply = (
        "[I am not sure what you mean|I do not understand that|I only speak simple English]. "
        "[Could you say it in other words?|Would you like a story?|Ask me for a story, if you "
        "like.]"
    )
    return [(user.strip() or "?", pick(rng, reply))]


def echo(rng: Random, how: Manner) -> list[Exchange]:
    """Repeat after me: more practice in copying."""
    pool = words.ANIMALS + words.THINGS + words.TRAITS + words.NUMBERS
    said = " ".join(rng.sample(pool, rng.randrange(1, 5)))
    if rng.random() < 0.3:
        said = grammar.invented_name(rng)
    elif rng.random() < 0.2:
        said = rng.choice(("hello world", "good night", "I am happy", "thank you", "the end"))
    return [(rng.choice(("Say: ", "Repeat after me: ", "Repeat: ", "Say ")) + said, said)]


Writer = Callable[[Random, Manner], list[Exchange]]
_WRITERS: Final[tuple[tuple[Writer, float], ...]] = (
    (stories, 10.0),
    (greeting, 2.5),
    (how_are_you, 1.5),
    (who_are_you, 2.0),
    (what_can_you_do, 1.0),
    (thanks, 1.0),
    (my_name, 2.0),
    (feeling, 1.5),
    (fact, 6.0),
    (capital, 2.0),
    (animal, 3.0),
    (describe, 1.5),
    (reading, 2.5),
    (opposite, 1.0),
    (sums, 2.5),
    (counting, 1.0),
    (lists, 1.0),
    (joke, 1.0),
    (riddle, 1.0),
    (poem, 2.0),
    (unknown, 5.0),
    (puzzled, 1.5),
    (echo, 1.0),
)


# --- careless typing -----------------------------------------------------------------------------

_KNOWN_NAMES: Final = frozenset(words.GIRLS + words.BOYS)
_PLAIN_WORDS: Final = frozenset(
    re.findall(
        r"\w+",
        "tell story about please write another what where does live make sound called would like "
        "short little nice hear could know poem joke riddle hello thank thanks capital opposite "
        "favorite named",
    )
)


def _typo(rng: Random, word: str) -> str:
    at = rng.randrange(len(word) - 1)
    kind = rng.randrange(3)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    return word[:at] + word[at] + word[at:]


def roughen(rng: Random, text: str) -> str:
    """Type `text` carelessly: case, punctuation and a typo may go, never the topic's own word.

    Invented names keep their case, because the answer has to spell them the same way.
    """
    if rng.random() < 0.4:
        return text
    if rng.random() < 0.7:
        text = re.sub(
            r"[A-Z][a-z]*",
            lambda m: (
                m.group()
                if m.start()
                and text[m.start() - 1] == " "
                and m.group() not in _KNOWN_NAMES
                and m.group() != "I"
                else m.group().lower()
            ),
            text,
        )
    if rng.random() < 0.5:
        text = text.rstrip(".!?")
    if rng.random() < 0.2:
        spots = [m for m in re.finditer(r"[a-z]{4,}", text) if m.group() in _PLAIN_WORDS]
        if spots:
            spot = rng.choice(spots)
            text = text[: spot.start()] + _typo(rng, spot.group()) + text[spot.end() :]
    if rng.random() < 0.08:
        text = rng.choice(("hey, ", "please ", "so ", "ok, ", "hm, ", "hi! ")) + text
    if rng.random() < 0.05:
        text += rng.choice((" 🙂", " :)", " !!", " thanks", " please", " ..."))
    return text or "?"


def _in_voice(rng: Random, text: str, how: Manner) -> str:
    if not how.pirate:
        return text
    return rng.choice(("Arr! ", "Ahoy! ", "Arr, matey! ", "Yo ho ho! ")) + text


def chat(rng: Random) -> list[Turn]:
    """One chat of one to four topics, with an optional system message first."""
    how = manner(rng)
    turns: list[Turn] = []
    if how.system is not None:
        turns.append(Turn("system", how.system))
    writers: Sequence[Writer] = [writer for writer, _ in _WRITERS]
    weights = [weight for _, weight in _WRITERS]
    exchanges: list[Exchange] = []
    if rng.random() < 0.15:
        exchanges += greeting(rng, how)
    for writer in rng.choices(writers, weights, k=rng.choice((1, 1, 1, 2, 2, 3))):
        exchanges += writer(rng, how)
    if rng.random() < 0.15:
        exchanges += rng.choice((thanks, goodbye))(rng, how)
    for asked, answered in exchanges:
        turns.append(Turn("user", roughen(rng, asked)))
        turns.append(Turn("assistant", _in_voice(rng, answered, how)))
    return turns
