"""Chats that the model itself ends: stories for the demo model, three kinds for a real one.

A seed gives the same requests for every server.
"""

import random
import re
from collections.abc import Sequence
from typing import Final

from perf.load.open_loop import StreamRequest

PATH: Final = "/v1/chat/completions"
STORIES: Final = tuple(("Tell me a story about {}.", patience_s) for patience_s in (1.0, 3.0, 8.0))
"""Questions of clients, and their deadlines in seconds; each kind is a third of them."""
APPLICATIONS: Final = (
    ("Write one sentence about {}.", 1.5),
    ("List three facts about {}.", 4.0),
    ("Tell me a short story about {}.", 10.0),
)
"""The same for a chat model with real weights."""
MAX_TOKENS: Final = 512
"""Cap in every story request, as from a careful client; most stories take about 170 tokens."""

_ARTICLE: Final = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|hones)")
# From the grammar of the model's training data (tools/demo_model of commit 108c2fb0).
_WHO: Final = re.split(
    " ",
    "fox rabbit mouse bear owl cat dog hedgehog squirrel badger otter duck frog turtle wolf lion "
    "elephant monkey tiger dragon crow whale bee horse pig cow hen penguin girl princess queen "
    "witch grandmother boy prince king wizard grandfather baker sailor farmer painter gardener "
    "fisher teacher shepherd miller robot knight pirate cook giant",
)
"""Beings that a story may be about."""
_THINGS: Final = re.split(
    " ",
    "lantern kite key drum bell book map boat clock flute hat scarf basket mirror compass blanket "
    "button cup ladder whistle ring teapot violin feather box candle telescope ball",
)


def chat(model: str, text: str, **more: object) -> dict[str, object]:
    """Body of a streamed chat of one message that reports its usage."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


Kinds = Sequence[tuple[str, float]]
"""Like ``STORIES``."""


def story(rng: random.Random, form: str = STORIES[0][0]) -> str:
    """Message with a template; the demo model answers with a story of about 170 tokens."""
    return _articles(form.format(f"a {rng.choice(_WHO)} and a {rng.choice(_THINGS)}"))


def stories(
    per_s: float, seconds: float, seed: int, model: str, kinds: Kinds = STORIES
) -> list[StreamRequest]:
    """Requests of a Poisson process of ``per_s`` for ``seconds``."""
    rng, asks, at_s = random.Random(seed), list[StreamRequest](), 0.0
    left: list[tuple[str, float]] = []
    while (at_s := at_s + rng.expovariate(per_s)) < seconds:
        # Drawn without replacement, so that the shares are equal in a short run, too.
        left = left or rng.sample(kinds, len(kinds))
        form, patience_s = left.pop()
        body = chat(model, story(rng, form), max_tokens=MAX_TOKENS)
        asks.append(StreamRequest(at_s, 1000 * patience_s, body))
    return asks


def at_once(count: int, tokens: int, seed: int, model: str) -> list[StreamRequest]:
    """``count`` simultaneous requests of exactly ``tokens`` each, with a deadline of two
    minutes."""
    rng = random.Random(seed)
    exact = {"max_tokens": tokens, "ignore_eos": True}
    return [StreamRequest(0.0, 120_000.0, chat(model, story(rng), **exact)) for _ in range(count)]


def _articles(text: str) -> str:
    """Change "a owl" to "an owl", and nothing else."""
    return _ARTICLE.sub(r"\1n ", text)
