"""The server to test: its address and its way to state a deadline."""

import json
import re
import string
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

_SAID: Final = re.compile(r"([A-Za-z0-9-]+)(:)\s*(.*\{.+)|([A-Za-z_]\w*)(=)(.*\{.+)")
_PLACES: Final = ("ms", "s", "unix_ms", "unix_s", "rfc3339")
_KNOWN: Final = ", ".join(f"{{{name}}}" for name in _PLACES)
HANG_UP: Final = "hang-up"


class BadTarget(ValueError):
    """An argument is invalid; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Saying:
    """How a deadline is stated: by a header, by a field, or by the client's hang-up."""

    place: str
    name: str = ""
    template: str = ""

    @property
    def is_told(self) -> bool:
        """Whether the server can know of the deadline before it is over."""
        return self.place != HANG_UP

    def said(self, left_s: float) -> str:
        """Text for a deadline in ``left_s`` seconds."""
        at = time.time() + left_s
        day = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        left = {"ms": max(0, round(1000 * left_s)), "s": f"{left_s:.3f}"}
        clock = {"unix_ms": round(1000 * at), "unix_s": f"{at:.3f}", "rfc3339": day}
        return self.template.format(**left, **clock)

    def unreadable(self) -> str:
        """Text that is not a deadline in any spelling."""
        return self.template.format(**dict.fromkeys(_PLACES, "soon"))

    def put(self, text: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        """State ``text`` as the deadline of a request."""
        if self.place == "header":
            headers[self.name] = text
        elif self.place == "body":
            body[self.name] = _plain(text)

    def __str__(self) -> str:
        between = {"header": ": ", "body": "="}.get(self.place, HANG_UP)
        return f"{self.name}{between}{self.template}"


def read_saying(text: str) -> Saying:
    """``NAME: TEMPLATE``, ``name=TEMPLATE`` or ``hang-up``. Raises ``BadTarget``."""
    if text == HANG_UP:
        return Saying(HANG_UP)
    expected = f"'X-Timeout-Ms: {{ms}}', 'deadline_ms={{ms}}' or '{HANG_UP}', with one of {_KNOWN}"
    if (match := _SAID.fullmatch(text)) is None:
        raise BadTarget(f"{text!r} says no deadline; expected something like {expected}")
    name, mark, template = filter(None, match.groups())
    if not (names := _placeholders(template)) or not names <= set(_PLACES):
        raise BadTarget(f"{text!r} has an unknown placeholder; expected {expected}")
    return Saying("header" if mark == ":" else "body", name, template)


def read_field(text: str) -> dict[str, Any]:
    """``name=value``; the value is JSON, or else a text. Raises ``BadTarget``."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        example = "expected name=value, for instance ignore_eos=true"
        raise BadTarget(f"{text!r} is not a field; {example}")
    return {name: _plain(value)}


def _placeholders(template: str) -> set[str]:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return set()


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Target:
    """``url`` is the API's base, with ``/v1``; ``partial`` what asks for a partial answer, where a
    server knows that; ``is_chat`` is false for one without chats. Raises ``BadTarget``."""

    url: str
    model: str
    deadline: Saying
    key: str = field(default="", repr=False)
    partial: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            example = "expected for instance http://127.0.0.1:8000/v1"
            raise BadTarget(f"{self.url!r} is not a base URL; {example}")
        if parts.username or parts.password:
            raise BadTarget("the URL has a user or password in it; give the key by itself")
        if not self.model:
            raise BadTarget("no model is named; GET /models of the server lists those it has")
