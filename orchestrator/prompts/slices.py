"""Cuts a text so that its tokens are those of its slices, one after the other.

Cuts are between a letter and a space or a sign: no token of the vocabulary may hold both, and the
surroundings of the cut are encoded in one and in two to check that it makes no difference.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import Tokenizer

_SIGNS = " \n,.;:!?()\u3001\u3002\uff0c\uff01\uff1f"
_LETTER = r"[^\W\d_]"
_AROUND = 64
_TRIES = 8
_WINDOW = 32_000
"""Characters searched at a time, because ``re`` keeps the interpreter's lock until it is done."""


class Slicer:
    """Cuts texts for one tokenizer.

    A tokenizer that puts a space before every text is given slices without the space that they
    begin with. ``spellings`` are the bytes that tokens stand for, empty where they are not known.
    """

    def __init__(self, tokenizer: Tokenizer, spellings: Iterable[bytes], slice_chars: int) -> None:
        def encode(text: str) -> Sequence[int]:
            ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids

        self._slice_chars = slice_chars
        self._encode: Callable[[str], Sequence[int]] = encode
        crossing = re.compile(rf"{_LETTER}([{re.escape(_SIGNS)}])")
        signs, is_known = set(_SIGNS), False
        for spelling in spellings:
            is_known = True
            signs -= set(crossing.findall(spelling.decode(errors="ignore")))
        whole = list(encode("tea and"))
        self._drops_space = [*encode("tea"), *encode(" and")] != whole
        if self._drops_space:
            is_known = is_known and [*encode("tea"), *encode("and")] == whole
            signs &= {" "}
        # An added token that takes the space around it may begin behind any cut.
        if any(t.lstrip for t in tokenizer.get_added_tokens_decoder().values()):
            signs -= {" ", "\n"}
        behind = re.escape("".join(sorted(signs)))
        self._cut = (
            re.compile(rf"[{behind}](?<={_LETTER}.)(?= ?{_LETTER})", re.DOTALL)
            if is_known and signs
            else None
        )

    def slices(self, text: str) -> Iterator[str]:
        """Yield the parts of ``text`` to be encoded by themselves; the last may be very long."""
        at = 0
        while len(text) - at > 2 * self._slice_chars:
            cut = self._cut_after(text, at + self._slice_chars)
            if cut is None:
                break
            yield text[at:cut]
            at = cut + self._drops_space
        yield text[at:]

    def _cut_after(self, text: str, start: int) -> int | None:
        if self._cut is None:
            return None
        tries = 0
        for window in range(start, len(text), _WINDOW):
            for match in self._cut.finditer(text, window, window + _WINDOW):
                at = match.start()
                if self._makes_no_difference(text, at):
                    return at
                tries += 1
                if tries == _TRIES:
                    return None
        return None

    def _makes_no_difference(self, text: str, at: int) -> bool:
        left, right = text[max(0, at - _AROUND) : at], text[at : at + _AROUND]
        parts = [*self._encode(left), *self._encode(right[self._drops_space :])]
        return parts == list(self._encode(left + right))
