"""Cuts a prompt's text before it is encoded: inside text that looks like a special token, so that
it does not become one (``Lookalikes``), and into slices that give the same tokens (``Slicer``).

Slices end between a letter and a space or punctuation mark. No token of the vocabulary may contain
both. The text around the cut is encoded whole and in two parts to check that the tokens are equal.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

_WINDOW = 32_000
"""Characters searched at a time, because ``re`` holds the GIL during a search."""

_UNICODE = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled")


class Lookalikes:
    """Finds the positions where any of ``tokens`` begins in a text, including overlaps. Uses a
    trie: the cost per character grows with the tokens' length, not their number. Tokens of one
    character cannot be broken, so they are ignored."""

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = [token for token in tokens if len(token) > 1]
        self._firsts = {token[0] for token in tokens}
        self._longest = max(map(len, tokens), default=0)
        self._pattern = _beginnings(tokens)

    def starts(self, text: str, begin: int = 0, end: int | None = None) -> Iterator[int]:
        """Yield the positions where tokens begin, from ``begin`` up to ``end``, in order."""
        end = len(text) if end is None else min(end, len(text))
        if not any(text.find(first, begin, end) >= 0 for first in self._firsts):
            return
        for window in range(begin, end, _WINDOW):
            border = min(window + _WINDOW, end)
            for match in self._pattern.finditer(text, window, border + self._longest):
                if match.start() >= border:
                    break
                yield match.start()


def unicode_normalizer(tokenizer: Tokenizer) -> Callable[[str], str] | None:
    """The normalization of a text before the search for ``normalized`` special tokens. None if
    there is no such token or no normalization."""
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.normalizer is None or not any(t.special and t.normalized for t in added):
        return None
    whole: dict[str, Any] = json.loads(tokenizer.to_str())["normalizer"]
    steps = whole["normalizers"] if whole["type"] == "Sequence" else [whole]
    steps = [step for step in steps if step["type"] in _UNICODE]
    if not steps:
        return None
    model = {"type": "BPE", "vocab": {}, "merges": []}
    normalizer = {"type": "Sequence", "normalizers": steps}
    like_it = Tokenizer.from_str(
        json.dumps({"version": "1.0", "normalizer": normalizer, "model": model})
    )
    normalize: Callable[[str], str] = like_it.normalizer.normalize_str
    return normalize


def _beginnings(tokens: Iterable[str]) -> re.Pattern[str]:
    root: dict[str, Any] = {}
    for token in tokens:
        node = root
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        if "" in node:  # the shortest token is enough
            return ""
        return "(?:" + "|".join(re.escape(c) + pattern(n) for c, n in sorted(node.items())) + ")"

    first = (f"{re.escape(char)}(?={pattern(node)})" for char, node in sorted(root.items()))
    return re.compile("|".join(first) or "(?!)")


_SIGNS = " \n,.;:!?()\u3001\u3002\uff0c\uff01\uff1f"
_LETTER = r"[^\W\d_]"
_AROUND = 64
_TRIES = 8


class Slicer:
    """Cuts texts for one tokenizer. If the tokenizer adds a space before every text, slices lose
    their leading space. ``spellings`` are the bytes of tokens, empty if unknown."""

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
        # An added token that includes the space around it may begin after any cut.
        if any(t.lstrip for t in tokenizer.get_added_tokens_decoder().values()):
            signs -= {" ", "\n"}
        behind = re.escape("".join(sorted(signs)))
        self._cut = (
            re.compile(rf"[{behind}](?<={_LETTER}.)(?= ?{_LETTER})", re.DOTALL)
            if is_known and signs
            else None
        )

    def slices(self, text: str) -> Iterator[str]:
        """Yield the parts of ``text`` to encode separately. The last part may be very long."""
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
