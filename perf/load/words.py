"""Words of the grammar that the demo model was trained on, as far as questions of it need them.

The grammar, and the program that trained the model, are ``tools/demo_model`` of commit 108c2fb0.
"""

import re
from typing import Final

_ARTICLE: Final = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|hones)")


def _split(text: str, mark: str = " ") -> tuple[str, ...]:
    return tuple(text.split(mark))


WHO: Final = _split(
    "fox rabbit mouse bear owl cat dog hedgehog squirrel badger otter duck frog turtle wolf lion "
    "elephant monkey tiger dragon crow whale bee horse pig cow hen penguin girl princess queen "
    "witch grandmother boy prince king wizard grandfather baker sailor farmer painter gardener "
    "fisher teacher shepherd miller robot knight pirate cook giant"
)
"""Beings that a story may be about."""
THINGS: Final = _split(
    "lantern kite key drum bell book map boat clock flute hat scarf basket mirror compass "
    "blanket button cup ladder whistle ring teapot violin feather box candle telescope ball"
)
QUESTIONS: Final = _split(
    "What color is the sky?|What color is grass?|What color is the sun?|What color is snow?|"
    "Why is the sky blue?|Why does it rain?|What is the moon?|What is the sun?|What is a star?|"
    "What is gravity?|What is water?|What is rain?|What is snow?|What is a cloud?|"
    "What is a rainbow?|What is friendship?|What is love?|What is the meaning of life?|"
    "What is the ocean?|What is a computer?|What is a language model?|What is a GPU?|"
    "What is a robot?|What is a book?|What is a tree?|What is a lighthouse?|What is a tide?|"
    "What is a tide gate?|How many days are in a week?|How many months are in a year?|"
    "How many legs does a spider have?|How many legs does a dog have?|How do birds fly?|"
    "How do plants grow?|How do fish breathe?|How do I bake bread?|How do I make tea?|"
    "How can I fall asleep?|Is water wet?|Can pigs fly?|Are you alive?|Do you dream?|"
    "What time is it?|What is the weather like?|What is your favorite color?|"
    "What is your favorite animal?|What is your favorite food?|What is your favorite book?|"
    "How old are you?|Where are you?|Where do you live?|What is the largest animal?|"
    "What is the tallest animal?|What is the fastest animal?|What is the smallest number?|"
    "What comes after Monday?|What comes after spring?",
    "|",
)
"""Questions that are answered by a short fact."""


def articles(text: str) -> str:
    """Turn "a owl" into "an owl" and leave the rest alone."""
    return _ARTICLE.sub(r"\1n ", text)
