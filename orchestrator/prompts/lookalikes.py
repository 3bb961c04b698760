"""Finds text of a client that looks like a special token of the model."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

_WINDOW = 32_000
"""Characters searched at a time, because ``re`` keeps the interpreter's lock until it is done."""

_UNICODE = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled")


class Lookalikes:
    """Finds where any of ``tokens`` begins in a text, also where they overlap.

    A trie: the cost per character grows with the length of tokens, not with their number. A token
    of one character cannot be broken, and is left out.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = [token for token in tokens if len(token) > 1]
        self._firsts = {token[0] for token in tokens}
        self._longest = max(map(len, tokens), default=0)
        self._pattern = _beginnings(tokens)

    def starts(self, text: str, begin: int = 0, end: int | None = None) -> Iterator[int]:
        """Yield where tokens begin, from ``begin`` up to ``end``, in order."""
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
    """The normalization of a text before a ``normalized`` special token is looked for in it.

    None where there is no such token or texts are not changed: then tokens are as they look.
    """
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
    """A pattern for the first character of each of ``tokens``."""
    root: dict[str, Any] = {}
    for token in tokens:
        node = root
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        if "" in node:  # the shortest says enough
            return ""
        return "(?:" + "|".join(re.escape(c) + pattern(n) for c, n in sorted(node.items())) + ")"

    first = (f"{re.escape(char)}(?={pattern(node)})" for char, node in sorted(root.items()))
    return re.compile("|".join(first) or "(?!)")
