"""Extracts the requests of one large JSON body while it comes in."""

import re
from collections.abc import Iterator

_MAX_REST_BYTES = 2**16
_WRONG_LIST = "requests must be a list of objects, with commas between them"
_OUTSIDE = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'["\\]')
_LIST_BEGINS = re.compile(rb'"requests"\s*:\s*\[$')


class NoElements(ValueError):
    """The body does not have the expected form; the message says why."""


class Elements:
    """Splits ``{"requests": [{…}, {…}], …}``: ``feed`` yields each object of that list, and
    ``rest`` is the body without them, for a decoder to read once all has come."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` is the bound on one object."""
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._element = bytearray()
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._has_any = False
        self._list_depth = 0
        """Depth at which the list's objects begin; 0 before the list, -1 once it is over."""

    @property
    def rest(self) -> bytes:
        """The body with an empty list in the place of the objects."""
        return bytes(self._rest)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the objects that end in ``piece``. Raises ``NoElements``."""
        at = 0
        while at < len(piece):
            if self._is_escaped:
                self._keep(piece[at : at + 1])
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(piece, at)
            if found is None:
                self._keep(piece[at:])
                return
            self._keep(piece[at : found.end()])
            at = found.end()
            if self._in_string:
                self._is_escaped = found[0] == b"\\"
                self._in_string = self._is_escaped
            elif found[0] == b'"':
                self._in_string = True
            elif found[0] in b"{[":
                self._opened(found[0])
            elif self._closed():
                yield bytes(self._element)
                self._element.clear()

    def _opened(self, bracket: bytes) -> None:
        self._depth += 1
        if self._list_depth == 0 and self._depth == 2 and _LIST_BEGINS.search(self._rest):
            self._list_depth = 2
        elif self._is_element_depth(1) and bracket == b"{":
            between = bytes(self._element[:-1]).strip()
            if between != (b"," if self._has_any else b""):
                raise NoElements(_WRONG_LIST)
            self._element[:] = b"{"
            self._has_any = True

    def _closed(self) -> bool:
        """Note a closing bracket; returns whether it was the end of an object of the list."""
        self._depth -= 1
        if self._depth < 0:
            raise NoElements("the body is not valid JSON: it closes more than it opens")
        if self._list_depth == 2 and self._depth < 2:
            self._rest += b"]"
            if self._element.rstrip(b" \t\r\n]"):
                raise NoElements(_WRONG_LIST)
            self._element.clear()
            self._list_depth = -1
            return False
        return self._is_element_depth(0)

    def _is_element_depth(self, above: int) -> bool:
        return self._list_depth == 2 and self._depth == 2 + above

    def _keep(self, text: bytes) -> None:
        if self._list_depth != 2:
            self._rest += text
            if len(self._rest) > _MAX_REST_BYTES:
                raise NoElements(
                    f"the body has more than {_MAX_REST_BYTES} bytes beside its requests"
                )
            return
        self._element += text
        if len(self._element) > self._most_bytes:
            raise NoElements(
                f"a request has more than {self._most_bytes} bytes (TIDEGATE_HTTP__MAX_BODY_BYTES)"
            )
