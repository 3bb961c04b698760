"""Ids of tasks, sessions and other items that clients ask for later. An id is 32 hexadecimal digits
after a prefix such as ``sess_``. If several orchestrators share a state (``orchestrator.state``),
the first eight digits are the tag of the orchestrator that made it, so that the others know which
one to ask. An id is enough to read its item, so the other digits are not guessable.
"""

import random
import re
import uuid

TAG_DIGITS = 8
_ID = re.compile(r"(?:^|[_-])([0-9a-f]{32})$")


class Ids:
    """Makes ids. ``rng`` must not be predictable; ``tag`` is empty without shared state."""

    def __init__(self, rng: random.Random, tag: str = "") -> None:
        self.tag = tag
        self._rng = rng

    def new(self) -> str:
        made = uuid.UUID(int=self._rng.getrandbits(128), version=4).hex
        return self.tag + made[len(self.tag) :]


def new_tag(rng: random.Random) -> str:
    return f"{rng.getrandbits(4 * TAG_DIGITS):0{TAG_DIGITS}x}"


def digits_of(name: str) -> str:
    """An id without its prefix; empty for a name of another form."""
    found = _ID.search(name)
    return "" if found is None else found[1]


def tag_of(name: str) -> str:
    """The tag in an id with its prefix; empty for a name of another form."""
    return digits_of(name)[:TAG_DIGITS]
