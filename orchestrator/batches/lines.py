"""Splits, reads and checks the lines of a batch's input. They are never all in memory."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec

from orchestrator.batches.records import BatchLine, LineError
from protocol import excerpt

MAX_ERRORS = 100
"""Most errors reported for one file. A file with more usually has one error throughout."""
_MAX_ID_CHARS = 512


class BadLine(ValueError):
    """A line that is not a valid request of a batch."""

    def __init__(self, code: str, message: str, param: str | None, line: int) -> None:
        super().__init__(message)
        self.error = LineError(code, f"line {line}: {message}", param, line)


class RawLine(NamedTuple):
    number: int
    """Number of the line, from 1."""
    text: bytes


class _Stated(msgspec.Struct, frozen=True):
    """The known fields of a line. Other fields are ignored."""

    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_Stated)


def split_lines(pieces: Iterable[bytes], most_bytes: int) -> Iterator[RawLine]:
    """Yield the non-blank lines. Raises ``BadLine`` for a line longer than ``most_bytes``."""
    before, rest = 0, b""
    for piece in chain(pieces, (b"\n",)):  # the last line may have no end
        parts = (rest + piece).split(b"\n")
        for at, text in enumerate(parts, 1):
            if len(text) > most_bytes:
                message = f"it must have at most {most_bytes} bytes (TIDEGATE_HTTP__MAX_BODY_BYTES)"
                raise BadLine("line_too_long", message, None, before + at)
            if at < len(parts) and text.strip():
                yield RawLine(before + at, text)
        before, rest = before + len(parts) - 1, parts[-1]


def read_line(raw: RawLine) -> BatchLine:
    """Read ``{"custom_id", "method", "url", "body"}``. Raises ``BadLine``."""
    number = raw.number
    try:
        stated = _decoder.decode(raw.text.decode())
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request", str(error), None, number) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadLine("invalid_json_line", "it is not a JSON object", None, number) from None
    if not stated.custom_id or len(stated.custom_id) > _MAX_ID_CHARS:
        raise BadLine(
            "missing_required_parameter",
            f"custom_id must be a string of 1 to {_MAX_ID_CHARS} characters",
            "custom_id",
            number,
        )
    body = bytes(stated.body)
    if body[:1] != b"{":
        raise BadLine("missing_required_parameter", "body must be an object", "body", number)
    return BatchLine(number, stated.custom_id, stated.method or "", stated.url or "", body)


@dataclass(slots=True, eq=False)
class Check:
    """Checks all lines of a file, some at a time, before the first line runs."""

    _lines: Iterator[RawLine]
    _endpoint: str
    _most_lines: int
    total: int = 0
    errors: list[LineError] = field(default_factory=list)
    _ids: set[bytes] = field(default_factory=set)
    """Digests of the custom ids so far: 16 bytes each for ids of any length."""

    def step(self, count: int) -> bool:
        """Check ``count`` more lines. Returns False after the last line or too many errors."""
        for _ in range(count):
            try:
                raw = next(self._lines, None)
                if raw is None:
                    break
                self._look(raw)
            except BadLine as bad:
                self.errors.append(bad.error)
                if bad.error.code == "line_too_long" or len(self.errors) >= MAX_ERRORS:
                    return False
            if self.total > self._most_lines:
                self.errors.append(
                    LineError(
                        "too_many_requests",
                        f"the file has more than {self._most_lines} requests; split it",
                    )
                )
                return False
        else:
            return True
        if not self.total and not self.errors:
            self.errors.append(LineError("empty_file", "the file has no requests"))
        return False

    def _look(self, raw: RawLine) -> None:
        line = read_line(raw)
        self.total += 1
        if line.method != "POST":
            raise BadLine("invalid_method", "method must be POST", "method", line.number)
        if line.url != self._endpoint:
            raise BadLine(
                "mismatched_endpoint",
                f"url is {excerpt(line.url)}; expected the batch's endpoint {self._endpoint}",
                "url",
                line.number,
            )
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            raise BadLine(
                "duplicate_custom_id",
                f"custom_id {excerpt(line.custom_id)} occurs in another line; use unique ids",
                "custom_id",
                line.number,
            )
        self._ids.add(digest)


def some_of(
    lines: Iterator[RawLine], is_done: Callable[[int], bool], most: int, most_bytes: int
) -> list[BatchLine]:
    """The next lines without an outcome: at most ``most`` lines and about ``most_bytes``. Empty at
    the end of the file. Raises ``BadLine`` if the file has changed since it was checked."""
    found: list[BatchLine] = []
    size = 0
    while len(found) < most and size < most_bytes and (raw := next(lines, None)) is not None:
        if not is_done(raw.number):
            found.append(read_line(raw))
            size += len(raw.text)
    return found
