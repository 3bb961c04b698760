"""The server to test: where it is, and how a deadline is said there."""

import json
import re
import string
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal
from urllib.parse import urlsplit

_HEADER: Final = re.compile(r"(?P<name>[A-Za-z0-9-]+):\s*(?P<template>.*\{.+)")
_FIELD: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<template>.*\{.+)")
RELATIVE: Final = ("ms", "s")
ABSOLUTE: Final = ("unix_ms", "unix_s", "rfc3339")
HANG_UP: Final = "hang-up"


class BadTarget(ValueError):
    """What was given cannot be used; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Saying:
    """How a deadline is said: by a header, by a field of the body, or not at all (``hang-up``:
    the client closes the connection)."""

    place: Literal["header", "body", "hang-up"]
    name: str = ""
    template: str = ""

    @property
    def is_told(self) -> bool:
        """Whether the server can know of the deadline before it is over."""
        return self.place != HANG_UP

    @property
    def is_absolute(self) -> bool:
        """Whether the deadline is a time of day."""
        return any(name in ABSOLUTE for name in _placeholders(self.template))

    def said(self, left_s: float, skew_s: float = 0.0) -> str:
        """Text for a deadline in ``left_s`` seconds, by a clock that is ``skew_s`` ahead of this
        machine's."""
        at = time.time() + skew_s + left_s
        return self.template.format(
            ms=max(0, round(1000 * left_s)),
            s=f"{left_s:.3f}",
            unix_ms=round(1000 * at),
            unix_s=f"{at:.3f}",
            rfc3339=datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        )

    def unreadable(self) -> str:
        """Text that is not a deadline in any spelling."""
        return self.template.format(**dict.fromkeys((*RELATIVE, *ABSOLUTE), "soon"))

    def put(self, text: str, headers: dict[str, str], body: dict[str, object]) -> None:
        """State ``text`` as the deadline of a request."""
        if self.place == "header":
            headers[self.name] = text
        elif self.place == "body":
            body[self.name] = _plain(text)

    def __str__(self) -> str:
        if self.place == "header":
            return f"{self.name}: {self.template}"
        return f"{self.name}={self.template}" if self.place == "body" else HANG_UP


def read_saying(text: str) -> Saying:
    """``NAME: TEMPLATE`` is a header, ``name=TEMPLATE`` a field, ``hang-up`` neither.

    Raises ``BadTarget``.
    """
    if text == HANG_UP:
        return Saying("hang-up")
    known = ", ".join(f"{{{name}}}" for name in (*RELATIVE, *ABSOLUTE))
    expected = f"'X-Timeout-Ms: {{ms}}', 'deadline_ms={{ms}}' or '{HANG_UP}', with one of {known}"
    header, field_ = _HEADER.fullmatch(text), _FIELD.fullmatch(text)
    match = header or field_
    if match is None:
        raise BadTarget(f"{text!r} says no deadline; expected something like {expected}")
    names = _placeholders(match["template"])
    if not names or not set(names) <= {*RELATIVE, *ABSOLUTE}:
        raise BadTarget(f"{text!r} has an unknown placeholder; expected {expected}")
    return Saying("header" if header else "body", match["name"], match["template"])


def read_field(text: str) -> dict[str, object]:
    """``name=value`` as fields of a body; the value is JSON, or else a text. Raises
    ``BadTarget``."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise BadTarget(
            f"{text!r} is not a field; expected name=value, for instance ignore_eos=true"
        )
    return {name: _plain(value)}


def _placeholders(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError:
        return []


def _plain(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


@dataclass(frozen=True, slots=True)
class Target:
    """``url`` is the API's base, with ``/v1``. Raises ``BadTarget``."""

    url: str
    model: str
    deadline: Saying
    key: str = field(default="", repr=False)
    absolute: Saying | None = None
    """How an absolute deadline is said, where the server knows them."""
    partial: Mapping[str, object] = field(default_factory=dict)
    """Fields that ask for what there is at the deadline, where the server knows that."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of every request."""
    drain: tuple[str, ...] = ()
    """Command that begins a drain of the server, which takes no part in it afterwards."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadTarget(
                f"{self.url!r} is not a base URL; expected for instance http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password:
            raise BadTarget("the URL has a user or password in it; give the key by itself")
        if not self.model:
            raise BadTarget("no model is named; GET /models of the server lists those it has")
        if self.absolute is not None and not self.absolute.is_absolute:
            known = ", ".join(f"{{{name}}}" for name in ABSOLUTE)
            raise BadTarget(
                f"'{self.absolute}' is not an absolute deadline; it needs one of {known}"
            )

    def path(self, path: str) -> str:
        return self.url.rstrip("/") + path
